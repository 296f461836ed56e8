# From here on the script is the same for every run.
over=$run/slurm/over # contains a word once no further job should run
if [ -s "$over" ]; then
  echo "nothing to do: $(cat "$over")"
  exit 0
fi
mkdir -p "$run/logs"
rm -f "$run"/logs/*.error.json "$run/logs/stop" # left by a job that was killed
export MESHWRIGHT_STOP_FILE=$run/logs/stop      # every rank checks for it after every step
saved() { ls "$run/checkpoints" 2>/dev/null | grep '^step-' | sort -V | tail -n 1; }
before=$(saved)

# USR1 comes before the time limit, TERM when Slurm ends the job: finish the step, save, exit.
asked=
ask() {
  asked=$1 again=1
  echo "SIG$1" >"$run/logs/.stop.$$" && mv "$run/logs/.stop.$$" "$run/logs/stop"
}
trap 'ask USR1' USR1
trap 'ask TERM' TERM

echo "$(date -u +%FT%TZ) job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
start &
step=$!
again=1
while [ -n "$again" ]; do
  again=
  wait $step
  code=$?
done

finish() { # why no further job should run, and the exit code
  echo "$1" >"$over"
  exit "$2"
}
count() { # increment a counter that is kept between jobs
  local file=$run/slurm/$1
  echo $(($(cat "$file" 2>/dev/null || echo 0) + 1)) >"$file" && cat "$file"
}
continue_later() { # from the newest checkpoint, in the next job or in this one, requeued
  if [ "$(saved)" != "$before" ]; then
    rm -f "$run/slurm/idle"
  elif [ "$(count idle)" -gt 3 ]; then
    finish "failed: four jobs in a row saved nothing" 1
  fi
  trap - TERM USR1
  if [ "$mode" = requeue ]; then
    for _ in $(seq 60); do
      answers=$(scontrol ping | grep " UP")
      if scontrol requeue "$SLURM_JOB_ID"; then
        sleep 60 # until Slurm ends this script
        break
      fi
      if [ -n "$answers" ]; then break; fi
      sleep 5 # a restarting controller comes back
    done
  fi
  exit 85
}

# A step that Slurm aborts with a lost node may end with 0: a run that trains is done only if its last word says so. Slurm
# kills what this script starts, too: only bash itself looks for that word.
was_cut_off() {
  local line last=
  if [ ! -e "$run/events.jsonl" ]; then return 1; fi # nothing that trains
  while IFS= read -r line; do
    case $line in *'"kind": "start"'* | *'"kind": "stop"'*) last=$line ;; esac
  done <"$run/events.jsonl" || return 0
  case $last in
  '' | *'"kind": "stop"'*'"reason": "finished"'*) return 1 ;;
  esac
}
if [ $code = 0 ] && was_cut_off; then code=1; fi
if [ $code -le "$judged" ]; then
  judge || finish "failed: the trial says no" 1
  finish "done" 0
fi
if [ -s "$over" ]; then exit 0; fi                         # cancelled
if [ "$asked" = TERM ]; then exit $code; fi                # Slurm decides what is next
if [ "$mode" = once ]; then finish "failed" $code; fi
if [ "$asked" = USR1 ]; then continue_later; fi
if [ $code = 85 ]; then continue_later; fi                 # only the ranks were asked to stop, as before a preemption
if [ $code = 2 ]; then finish "failed: rejected, see its log" 2; fi # a user error does not go away
# A lost node shows first as ranks that lost their peers: check that all nodes still answer.
if ! timeout 60 srun --overlap --ntasks="$SLURM_NNODES" --ntasks-per-node=1 true; then
  echo "a node does not answer"
  continue_later
fi
if [ "$(count crashes)" -le "$max_restarts" ]; then continue_later; fi
finish "failed" $code
