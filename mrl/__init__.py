"""mrl: language models of different families learn from each other (mutual reinforcement learning, arXiv 2605.07244)"""

__version__ = "0.1.0"
