"""Commands against an installation in a cluster, by HTTP alone: no kubectl, no kubeconfig."""
