"""Ray: connect or start, take the inventory, reserve devices, place one worker exactly.

Ray has no option for a GPU index. So a run reserves each device with a placement group of its own,
learns from inside which GPU the group got, and starts the engine's actor without GPUs of its own on
that node, told by ``CUDA_VISIBLE_DEVICES`` which reserved GPUs to use, in rank order. The worker
proves the outcome.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytest.errors import UnavailableError, UsageError
from raytest.inventory import Device, Inventory, Node, Slot
from raytest.spec import Cluster as ClusterSpec
from raytest.spec import NodeSpec

NODE_LABEL = "raytest/node"
OBJECT_STORE_BYTES = 256 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 60.0


@contextlib.contextmanager
def connect(address: str, cluster: ClusterSpec) -> Iterator[None]:
    """A Ray connection for the block: ``local`` starts virtual nodes here and stops them after,
    ``auto``, ``HOST:PORT`` and ``ray://…`` join. Raises UnavailableError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    # before anything starts: a second cluster on this machine would be talked about on stderr
    logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():
        raise UsageError("Ray is already connected in this process")
    local = _start_local(cluster) if address == "local" else None
    # Ray's driver prints notices on stdout, which carries data; exceptions say the same.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            _join(address, local)
            yield
        finally:
            ray.shutdown()
            if local is not None:
                local.shutdown()


def _join(address: str, local: Any) -> None:
    import ray

    if local is None:
        _refuse_silence(address)
    try:
        ray.init(
            address=local.address if local else address,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=local is None,
            runtime_env=None if local else {"py_modules": [str(Path(__file__).parent)]},
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnavailableError(
            f"--address {address}: no Ray cluster there ({reason}); "
            "'ray start --head' starts one, --address local needs none"
        ) from None


def _refuse_silence(address: str) -> None:
    """Ray waits minutes for a head that is not there; a port with no listener says so at once.

    Raises UnavailableError.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnavailableError(
            f"--address {address}: no Ray cluster there ({reason}); "
            "'ray start --head' starts one, --address local needs none"
        ) from None


def _start_local(cluster: ClusterSpec) -> Any:
    """Virtual nodes on this machine: each offers its share of the GPUs, or CPU devices."""
    from ray.cluster_utils import Cluster

    gpus = _local_gpu_indices()
    nodes = Cluster(shutdown_at_exit=True)
    try:
        with _apart_from_our_signals():
            for i, node in enumerate(cluster.nodes_named()):
                share = gpus[i :: len(cluster.nodes)] if gpus else []
                nodes.add_node(**_node_arguments(node, share))
    except (RuntimeError, TimeoutError, OSError, ValueError) as error:
        nodes.shutdown()
        raise UnavailableError(f"Ray did not start here: {str(error).splitlines()[0]}") from None
    return nodes


@contextlib.contextmanager
def _apart_from_our_signals() -> Iterator[None]:
    """Ray processes started inside the block get a session of their own.

    Ctrl-C and ``timeout`` signal the whole process group: a head that dies of it leaves a run
    waiting for Ray's own time limits instead of ending its workers in good order. Ray has no
    setting for it.
    """
    from ray._private import services

    original = services.ConsolePopen
    services.ConsolePopen = functools.partial(original, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = original


def _node_arguments(node: NodeSpec, gpus: Sequence[str]) -> dict[str, Any]:
    env = dict(node.env)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {
        "num_cpus": max(node.devices or 1, len(gpus)),
        "num_gpus": len(gpus),
        "labels": {NODE_LABEL: str(node.name), **node.labels},
        "env_vars": env,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }


def _local_gpu_indices() -> list[str]:
    from raytest.fingerprint.gpu import gpus

    indices = [g["index"] for g in gpus()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return indices if visible is None else [v for v in visible.split(",") if v.strip()]


def take_inventory(share: int = 1) -> Inventory:
    """Nodes that are alive and their devices. GPUs that other Ray jobs hold are not in it."""
    import ray

    alive = [n for n in ray.nodes() if n["Alive"]]
    if not alive:
        raise UnavailableError("the Ray cluster has no node that is alive")
    names = _stable_names(alive)
    facts = _node_facts([n["NodeID"] for n in alive])
    nodes = []
    for entry in alive:
        node_id = entry["NodeID"]
        name, known = names[node_id], facts[node_id]
        if entry["Resources"].get("GPU", 0) >= 1:
            devices = _gpu_devices(name, known["gpus"], int(entry["Resources"]["GPU"]), share)
        else:
            count = int(entry["Resources"].get("CPU", 0))
            devices = [
                Device(name, i, f"cpu:{name}:{i}", "cpu", known["cpu"]) for i in range(count)
            ]
        labels = dict(entry.get("Labels") or {})
        nodes.append(Node(name, node_id, known["hostname"], tuple(devices), labels))
    return Inventory(tuple(sorted(nodes, key=lambda n: n.name)))


def _stable_names(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names that stay from run to run: raytest's own label, else the hostname, numbered where
    several raylets share a host."""
    names: dict[str, str] = {}
    ordered = sorted(entries, key=lambda e: (e["NodeManagerHostname"], e["NodeManagerPort"]))
    for entry in ordered:
        base = (entry.get("Labels") or {}).get(NODE_LABEL) or entry["NodeManagerHostname"]
        name, n = base, 2
        while name in names.values():
            name, n = f"{base}~{n}", n + 1
        names[entry["NodeID"]] = name
    return names


def _gpu_devices(
    node: str, known: Sequence[Mapping[str, str]], count: int, share: int
) -> list[Device]:
    """A node's GPUs; where NVML is absent (a test's pretended GPUs) they are known by index
    alone."""
    if known:
        gpus = [
            (int(g["index"]), g["uuid"], g.get("name", ""), g.get("serial", "")) for g in known
        ][:count]
    else:
        gpus = [(i, f"gpu:{node}:{i}", "", "") for i in range(count)]
    return [
        Device(node, index, uuid, "gpu", model, share=s, serial=serial)
        for s in range(share)
        for index, uuid, model, serial in gpus
    ]


def _node_facts(node_ids: Sequence[str]) -> dict[str, Any]:
    """Hostname, CPU model and GPUs of each node, asked on the node itself."""
    return run_on_nodes(node_ids, _facts_here, PROBE_TIMEOUT_S)


def _facts_here() -> dict[str, Any]:
    from raytest.fingerprint.gpu import gpus

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    allowed = None if visible is None else [v.strip() for v in visible.split(",")]
    found = [g for g in gpus() if allowed is None or g["index"] in allowed or g["uuid"] in allowed]
    return {"hostname": socket.gethostname(), "cpu": _cpu_model(), "gpus": found}


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def run_on_nodes(
    node_ids: Sequence[str], function: Any, timeout_s: float, *args: Any
) -> dict[str, Any]:
    """Call ``function`` once on each node, taking no resources; results by node id.

    Raises UnavailableError naming the nodes that did not answer in time.
    """
    import ray

    task = ray.remote(function)
    refs = {
        node_id: task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=_on_node(node_id)
        ).remote(*args)
        for node_id in node_ids
    }
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    results, silent = {}, []
    for node_id, ref in refs.items():
        try:
            if ref not in ready:
                raise TimeoutError
            results[node_id] = ray.get(ref)
        except (ray.exceptions.RayError, TimeoutError):
            silent.append(node_id)
    if silent:
        raise UnavailableError(f"no answer from node {', '.join(silent)} within {timeout_s:.0f} s")
    return results


def _on_node(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def node_temporary_folder(run_id: str) -> str:
    """Where a worker keeps its output on its own node until the driver has fetched it."""
    return str(Path(tempfile.gettempdir()) / f"raytest-{os.getuid()}" / run_id)


def start_worker(
    job: Any, slot: Slot, *, node_id: str, env: Mapping[str, str], runtime_env: Mapping[str, Any]
) -> Any:
    """Create the actor of one launch on its slot; returns its handle at once.

    No restarts and no retries by Ray: either would mix two processes in one result.
    """
    import ray

    from raytest.worker import Worker

    variables = dict(env)
    gpu = slot.devices[0].kind == "gpu"
    if gpu and len(slot.nodes) == 1 and not slot.devices[0].uuid.startswith("gpu:"):
        # CUDA numbers GPUs by speed unless told otherwise; NVML and Ray number them by PCI bus.
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(d.index) for d in slot.devices)
    options: dict[str, Any] = {
        "num_cpus": 0 if gpu else len(slot.devices),
        "num_gpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {**runtime_env, "env_vars": variables},
        "scheduling_strategy": _on_node(node_id),
    }
    return ray.remote(Worker).options(**options).remote(job)


def worker_errors() -> tuple[type[Exception], ...]:
    """What waiting for a worker raises when its process, its node or the cluster is gone."""
    from ray.exceptions import RayError

    return (RayError,)


def end_worker(actor: Any, node_id: str, pid: int | None) -> None:
    """Kill a worker and every process it started, and wait until they are gone."""
    import ray

    if pid is not None:
        with contextlib.suppress(UnavailableError):
            run_on_nodes([node_id], _end_tree, 30.0, pid)
    ray.kill(actor, no_restart=True)


def _end_tree(pid: int) -> int:
    """End what is left of a process tree (older Rays leave an engine's children behind)."""
    import psutil

    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = [p for p in psutil.process_iter() if _descends_from(p, pid)]
    for process in tree:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(tree, timeout=20)
    return len(tree)


def _descends_from(process: Any, pid: int) -> bool:
    """An orphan keeps its process group, which Ray sets to the worker's pid."""
    try:
        return os.getpgid(process.pid) == pid
    except OSError:
        return False


def fetch_log(node_id: str, path: str, limit: int = 1 << 20) -> str:
    """The last part of a worker's output, from its node, and remove the file there."""
    try:
        return str(run_on_nodes([node_id], _read_and_remove, 30.0, path, limit)[node_id])
    except UnavailableError as error:
        return f"(output not fetched: {error})"


def _read_and_remove(path: str, limit: int) -> str:
    from raytest.fingerprint.redact import redact_text

    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - limit))
            text = file.read().decode("utf-8", "replace")
        os.unlink(path)
    except OSError as error:
        return f"(no output: {error.strerror})"
    return redact_text(text)
