"""The agent, which runs on every node beside the ranks, with torch: joins the rendezvous, starts ranks, keeps records.

It may import `training`, `deploy.host` and `inventory.errors`.
"""
