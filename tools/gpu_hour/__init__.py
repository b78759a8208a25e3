"""The first hour on a GPU: what `gpu_hour.sh` measures, in stages that do not need each other.

__main__.py  the words of the command, and the stages
carry.py     wheels for a machine without network: fetched there, installed here
bench.py     where a part measures and tells its figures
parts.py     each part of a stage in a process of its own, within the time that is left
contact.py   what the machine has, the GPU tests, a whole run
noise.py     how far the same weights are from themselves, by number format, kernel and batch
shapes.py    random models of the shapes of released ones
learner.py   the Trainer at these shapes: speed, and memory beside the plan's
weights.py   the way of new weights, part by part
resume.py    kill -9 of a learner, and what becomes of the run
vllm.py      a vLLM server beside a learner on one GPU
"""
