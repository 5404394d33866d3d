"""Other programs' libraries ask nothing of the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when they are imported
