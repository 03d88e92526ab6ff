"""One vLLM engine in a child process: the wire, the parent's handle, and the child's side.

`messages` and `channel` are shared. `process` is imported by the router's process and loads neither
torch nor vLLM until an engine starts. `host` and `worker` run in the child only.
"""
