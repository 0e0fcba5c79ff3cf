"""Which rank am I, on what device, and is the process group healthy?"""

from typing import TYPE_CHECKING

from dist_env.lazy import lazy_names
from dist_env.orphans import die_with_parent, die_with_parent_command
from dist_env.orphans import die_with_torchrun as _die_with_torchrun

if TYPE_CHECKING:
    from dist_env.collectives import barrier, broadcast_object, gather_objects, main_process_first
    from dist_env.command_line import (
        HelpFormatter,
        add_version,
        leave_broken_pipe,
        parse_size,
        printable,
        size_text,
    )
    from dist_env.control_group import ControlGroup, Transfer
    from dist_env.encoding import decode_value, encode_value
    from dist_env.environment import DistributedEnvironment
    from dist_env.errors import DistributedEnvironmentError, RankFailedError, RankTimeoutError, may_pass
    from dist_env.examination import AllReduceResult, Diagnosis, examine
    from dist_env.heartbeat import Heartbeat, RankStatus, StallReport
    from dist_env.interface import DistributedEnvInterface, StaticDistributedEnvironment, fake_job, is_alone
    from dist_env.layout import ParallelLayout
    from dist_env.liveness import naming_lost_ranks
    from dist_env.logging import forget_warnings, get_logger
    from dist_env.meshes import Meshes
    from dist_env.object_store import (
        STORE_SCHEMES,
        ObjectInfo,
        ObjectStore,
        open_object_store,
        split_address,
    )
    from dist_env.point_to_point import LinkResult
    from dist_env.rank_report import RankReport
    from dist_env.store_errors import StoreError, StoreSettingsError
    from dist_env.tree_sums import HostSums, own_address
    from dist_env.variables import unused_launcher
    from dist_env.worker_processes import die_with_parent_context, tie_loader_workers

__all__ = [
    "STORE_SCHEMES",
    "AllReduceResult",
    "ControlGroup",
    "Diagnosis",
    "DistributedEnvInterface",
    "DistributedEnvironment",
    "DistributedEnvironmentError",
    "Heartbeat",
    "HelpFormatter",
    "HostSums",
    "LinkResult",
    "Meshes",
    "ObjectInfo",
    "ObjectStore",
    "ParallelLayout",
    "RankFailedError",
    "RankReport",
    "RankStatus",
    "RankTimeoutError",
    "StallReport",
    "StaticDistributedEnvironment",
    "StoreError",
    "StoreSettingsError",
    "Transfer",
    "add_version",
    "barrier",
    "broadcast_object",
    "decode_value",
    "die_with_parent",
    "die_with_parent_command",
    "die_with_parent_context",
    "encode_value",
    "examine",
    "fake_job",
    "forget_warnings",
    "gather_objects",
    "get_logger",
    "is_alone",
    "lazy_names",
    "leave_broken_pipe",
    "main_process_first",
    "may_pass",
    "naming_lost_ranks",
    "open_object_store",
    "own_address",
    "parse_size",
    "printable",
    "size_text",
    "split_address",
    "tie_loader_workers",
    "unused_launcher",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, renamed={"imagined_job": "fake_job"})


_die_with_torchrun()
