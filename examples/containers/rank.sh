#!/bin/sh
# One container of a run, for one GPU: profiles it, waits for the plan, and trains its rank. Rank 0 also plans, serves
# the store and writes the report. All containers see the folder JOB; RANK and RANKS say which one this is.
# SIGTERM is passed on: the rank finishes its step and leaves, and may come back later, but for rank 0.
set -eu
# In an indexed Kubernetes job a pod has an index instead of a rank.
: "${RANK:=$((${FIRST_RANK:-0} + ${JOB_COMPLETION_INDEX:?neither RANK nor JOB_COMPLETION_INDEX is set}))}"
: "${RANKS:?how many ranks the run has is not set}" "${JOB:=job}"
: "${NET:=net.py}" "${TRAIN:=train.py}" "${GLOBAL_BATCH:=300}" "${SAMPLES:=18000}"
: "${HOST:=rank-0}" "${PORT:=5555}" "${PROFILE_OPTIONS:=}" "${RUN_OPTIONS:=}"

say() { echo "rank $RANK: $1" >&2; }
of_all() { seq -f "$JOB/$1" 0 $((RANKS - 1)); }
until_there() { # or until another rank has failed
    for file; do
        until [ -s "$file" ]; do
            for failed in "$JOB"/failed-*; do [ ! -e "$failed" ] || { say "stops: ${failed##*/}"; exit 1; }; done
            sleep 0.2
        done
    done
}

mkdir -p "$JOB"
times=0
again=
while [ -e "$JOB/left-$RANK-$times" ]; do times=$((times + 1)) again=.$times; done
if [ $times = 0 ] || [ "$RANK" = 0 ]; then
    [ ! -e "$JOB/profile-$RANK.json" ] || { say "$JOB holds an earlier run: remove it, or set JOB"; exit 1; }
fi
server=
run=
ended() {
    case $1 in
    0) ;;
    143) : > "$JOB/left-$RANK-$times" ;;
    *) : > "$JOB/failed-$RANK" ;;
    esac
    [ -z "$server" ] || kill "$server"
}
trap 'ended $?' EXIT
trap '[ -z "$run" ] || kill -TERM "$run"; [ -n "$run" ] || exit 143' TERM
# shellcheck disable=SC2086  # options are words
[ -e "$JOB/profile-$RANK.json" ] || pyps-profile "$NET" $PROFILE_OPTIONS -o "$JOB/profile-$RANK.json"

if [ "$RANK" = 0 ]; then
    # shellcheck disable=SC2046
    until_there $(of_all profile-%g.json)
    {
        printf '[job]\nglobal_batch = %d\n' "$GLOBAL_BATCH"
        for rank in $(seq 0 $((RANKS - 1))); do
            printf '[[worker]]\nname = "rank-%d"\nprofile = "profile-%d.json"\n' "$rank" "$rank"
        done
    } > "$JOB/cluster.toml"
    pyps-plan "$JOB/cluster.toml" -o "$JOB/plan.json"
    pyps serve job --bind "tcp://${BIND:-$(hostname -I | cut -d " " -f 1)}:$PORT" --keys "$JOB/keys" &
    server=$!
fi

until_there "$JOB/plan.json" "$JOB/keys/client.key"
# shellcheck disable=SC2086
pyps run --connect "tcp://$HOST:$PORT/job?keys=$JOB/keys/client.key" --ranks "$RANK" --plan "$JOB/plan.json" \
    --samples "$SAMPLES" --run-dir "$JOB/rank-$RANK$again" $RUN_OPTIONS "$TRAIN" &
run=$!
status=143 # a signal ends `wait`, not the run
while [ $status = 143 ] && kill -0 "$run" 2>/dev/null; do
    status=0
    wait "$run" || status=$?
done
[ $status = 0 ] || exit $status

if [ "$RANK" = 0 ]; then
    # shellcheck disable=SC2046
    until_there $(of_all rank-%g/report.json)
    for folder in "$JOB"/rank-*; do until_there "$folder/report.json"; done
    pyps report "$JOB"/rank-* -o "$JOB/report.html"
fi
