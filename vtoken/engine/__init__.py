"""The vLLM plugin: the only package that imports vllm.

plugin         entry point `vllm.general_plugins`; registers names, changes nothing by itself
args           engine arguments that switch vToken on
capabilities   what is supported; refuses the rest at start-up, by name; release: which vLLM
spec, block_manager, connector, scheduler_side    engine core process
worker, substrate, backend_cpu, session           worker process; on a GPU worker_gpu, strict_readers,
                                                  backend_{cuda,flash,triton}
stats          worker + scheduler -> Snapshot in the API process
service        vLLM's own OpenAI layer over AsyncLLM, for vtoken.serving
"""
