"""What the cluster is: the inventory file, its schema and its errors."""
