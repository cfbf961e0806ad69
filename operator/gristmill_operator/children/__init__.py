"""The objects that the operator makes in a cluster, one noun a module. Pure: no client, no clock."""
