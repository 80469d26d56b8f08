"""The command line."""
def main() -> int: return 0
