"""Training in the jobs of Slurm: `paceline train RECIPE --on slurm`. All it needs are Slurm's own commands.

login node     prints a job for sbatch: paceline train my.toml --on slurm --out runs/mine | sbatch --time=04:00:00
in a job       this process is the server, and srun starts the workers; or srun starts all ranks
in srun's own  each task is a rank: srun paceline train hpsgd.toml --on slurm --out runs/mine

allocation     what the job has: nodes, tasks of each, cores of a task; read from Slurm's variables
steps          processes on the job's nodes, started by one srun: where each task goes, what they write, their end
served         the server of a job and its workers, with keys that are on no disk
worker         `python -m paceline.slurm.worker`: one task of the workers' step
ranks          ranks of a job: how a task learns its rank, and where rank 0's store is
script         the job that the login node prints
requeue        whether a job has begun the run in a folder, so that it goes on by itself when it is started again
"""
