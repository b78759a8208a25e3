"""Parts of `gpu_hour.sh`, the first hour of mrl on a GPU: measurements in stages that do not need each other.

__main__.py arguments of the command, and the stages carry.py wheels for a machine without network: fetched here,
installed there bench.py place where a part measures and writes its figures parts.py each part of a stage in a process
of its own, within the time that is left contact.py equipment of the machine, the GPU tests, a whole run noise.py
differences of log-probabilities of equal weights, by number format, kernel and batch shapes.py random models of the
shapes of released ones learner.py the Trainer at these shapes: speed, and memory beside the plan's weights.py the way
of new weights, part by part run.py a whole run in the shapes of two released families resume.py kill -9 of a learner,
and the run after it vllm.py a vLLM server beside a learner on one GPU
"""
