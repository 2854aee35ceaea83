"""What a cluster is: devices, mesh axes, links, and the curves that were measured of them."""
