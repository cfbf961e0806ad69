"""Runs inside the cluster's namespaces: import image archives into its containerd.  loading.py ARCHIVE ..."""

import sys
from pathlib import Path

import plan
from bringup import load_images

if __name__ == "__main__":
    load_images(plan.load(plan.default_folder()), [Path(name) for name in sys.argv[1:]])
