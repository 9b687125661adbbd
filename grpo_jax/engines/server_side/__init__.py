"""Scripts that the server's processes run by path, in other interpreters. Never imported."""
