"""Check of devices: CUDA devices, and the backends of torch.distributed that serve them."""

from __future__ import annotations

from manyhands.cli.doctor.finding import GIB, Finding, Variables


def check(variables: Variables) -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        found = "this torch was built without torch.distributed"
        return Finding("fail", found, "install a build with it; one process still works")
    names = ("gloo", "nccl", "mpi")
    backends = [name for name in names if getattr(dist, f"is_{name}_available")()]
    found = f"links {', '.join(['shared', *backends])}; "
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found += ", ".join(f"{g.name} ({g.total_memory / GIB:.0f} GiB)" for g in gpus)
    else:
        why = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        found += f"no CUDA device{why}: training runs on the CPU"
    if "gloo" not in backends:
        do = (
            "gloo is missing from this torch: only one machine and GPUs will work; "
            "install another build"
        )
        return Finding("fail", found, do)
    if torch.cuda.is_available() and "nccl" not in backends:
        do = "GPUs without nccl exchange through the CPU: install a CUDA build of torch"
        return Finding("warn", found, do)
    return Finding("ok", found)
