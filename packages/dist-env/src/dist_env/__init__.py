"""Which rank am I, on what device, and is the process group healthy?"""

from dist_env.collectives import barrier, broadcast_object, gather_objects, main_process_first
from dist_env.environment import DistributedEnvironment
from dist_env.errors import DistributedEnvironmentError, RankFailedError, RankTimeoutError
from dist_env.heartbeat import Heartbeat
from dist_env.host_sums import HostSums
from dist_env.imagined import imagined_job
from dist_env.interface import DistributedEnvInterface, StaticDistributedEnvironment, is_alone
from dist_env.logging import forget_warnings, get_logger
from dist_env.lost_ranks import naming_lost_ranks
from dist_env.stall import RankStatus, StallReport

__all__ = [
    "DistributedEnvInterface",
    "DistributedEnvironment",
    "DistributedEnvironmentError",
    "Heartbeat",
    "HostSums",
    "RankFailedError",
    "RankStatus",
    "RankTimeoutError",
    "StallReport",
    "StaticDistributedEnvironment",
    "barrier",
    "broadcast_object",
    "forget_warnings",
    "gather_objects",
    "get_logger",
    "imagined_job",
    "is_alone",
    "main_process_first",
    "naming_lost_ranks",
]
