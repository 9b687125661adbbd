"""Scripts that the server's processes run by path, in other interpreters. Nothing imports them."""
