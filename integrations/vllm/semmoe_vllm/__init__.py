"""A general plug-in for vLLM that counts local activations and returns routed experts.

counters: the counters of a rank in a shared file, and the Prometheus collector that reads the files
capture:  the experts that the MoE layers of one worker choose in a step
rows:     the routed experts of the requests that ask for them, in the process of the scheduler
plugin:   the places where vLLM calls the others
overhead: a program that measures what counting costs

counters and rows need NumPy only, capture also PyTorch; only plugin and overhead import vLLM.
"""
