# Sourced by the job script, before ranks are started. Sets what Aurora's documentation asks of a
# run over oneCCL with MPI, unsets what keeps exchanges from overlapping. Never run by this project.

# The machine's own, before an environment is entered that may bring another (the package mpich).
MPIEXEC=$(command -v mpiexec)
source "${COCODIFF_VENV:?set it to the environment that docs/howto/aurora.md says how to make}/bin/activate"

export ZE_FLAT_DEVICE_HIERARCHY=FLAT # every tile is a device: 12 per node
export CCL_PROCESS_LAUNCHER=pmix
export CCL_ATL_TRANSPORT=mpi
export CCL_KVS_MODE=mpi
export FI_MR_CACHE_MONITOR=userfaultfd
unset CCL_OP_SYNC TORCH_XCCL_BLOCKING_WAIT

# Ranks per node, and the cores of each, next to its tile.
RANKS_PER_NODE=12
CPU_BIND=list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79
export OMP_NUM_THREADS=4

# Where ranks meet. PALS tells nobody: it is the same on all nodes because it is set here.
NODES=$(sort -u "$PBS_NODEFILE" | wc -l)
NUM_RANKS=$((NODES * RANKS_PER_NODE))
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
MASTER_PORT=$((29500 + ${PBS_JOBID%%.*} % 1000))
WORLD_SIZE=$NUM_RANKS
export MASTER_ADDR MASTER_PORT WORLD_SIZE

# One process per tile.
on_tiles() {
    "$MPIEXEC" --pmi=pmix -n "$NUM_RANKS" -ppn "$RANKS_PER_NODE" --cpu-bind="verbose,$CPU_BIND" "$@"
}
