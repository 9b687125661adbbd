"""Values of options: allowed values, the nearest valid name, JSON that may be broken. Pure."""
