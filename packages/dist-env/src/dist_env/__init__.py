"""Which rank am I, on what device, and is the process group healthy?"""

from dist_env.collectives import barrier, broadcast_object, gather_objects, main_process_first
from dist_env.control_group import ControlGroup
from dist_env.decoding import decode_value
from dist_env.encoding import encode_value
from dist_env.environment import DistributedEnvironment
from dist_env.errors import DistributedEnvironmentError, RankFailedError, RankTimeoutError
from dist_env.heartbeat import Heartbeat
from dist_env.host_sums import HostSums
from dist_env.imagined import imagined_job
from dist_env.interface import DistributedEnvInterface, StaticDistributedEnvironment, is_alone
from dist_env.layout import ParallelLayout
from dist_env.logging import forget_warnings, get_logger
from dist_env.lost_ranks import naming_lost_ranks
from dist_env.meshes import Meshes
from dist_env.orphans import die_with_parent, die_with_parent_command
from dist_env.orphans import die_with_torchrun as _die_with_torchrun
from dist_env.stall import RankStatus, StallReport
from dist_env.worker_processes import die_with_parent_context, tie_loader_workers

__all__ = [
    "ControlGroup",
    "DistributedEnvInterface",
    "DistributedEnvironment",
    "DistributedEnvironmentError",
    "Heartbeat",
    "HostSums",
    "Meshes",
    "ParallelLayout",
    "RankFailedError",
    "RankStatus",
    "RankTimeoutError",
    "StallReport",
    "StaticDistributedEnvironment",
    "barrier",
    "broadcast_object",
    "decode_value",
    "die_with_parent",
    "die_with_parent_command",
    "die_with_parent_context",
    "encode_value",
    "forget_warnings",
    "gather_objects",
    "get_logger",
    "imagined_job",
    "is_alone",
    "main_process_first",
    "naming_lost_ranks",
    "tie_loader_workers",
]

_die_with_torchrun()
