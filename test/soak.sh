#!/usr/bin/env bash
# soak.sh : long runs with many random cases (SEMMOE_TESTS=soak; see docs/testing.md). SOAK_MINUTES (default 10) is the time of each fuzz
# target. Then tests of placements, schedules, kills, rollouts, the request router and specs run with more cases, and the nightly tests
# SOAK_ROUNDS times (default 1).
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
export SEMMOE_TESTS=soak
minutes=${SOAK_MINUTES:-10}
rounds=${SOAK_ROUNDS:-1}

grep -rl --include='*_test.go' '^func Fuzz' internal solver test 2>/dev/null | sort | while read -r file; do
  package=./$(dirname "$file")
  for target in $(grep -o '^func Fuzz[A-Za-z0-9_]*' "$file" | cut -d' ' -f2); do
    echo "=== fuzz $package $target for $minutes minutes"
    go test -run '^$' -fuzz "^$target\$" -fuzztime "${minutes}m" -fuzzminimizetime 20x "$package"
  done
done
echo "=== 10,000 small layers against enumeration"
go test -count=1 -timeout 120m ./solver/placement -run 'AutoReachesTheOptimum' -v
echo "=== 200 kills during reshuffling, alone and with a shared directory"
go test -count=1 -timeout 1h ./internal/model/reshuffle -run 'RandomKills|SharedDirectory'
echo "=== the sampled local activation rate of 2,800 requests against the engine's"
go test -count=1 -timeout 30m ./internal/router -run SampledRate -v
echo "=== 10,000 random placements under every kind of constraint"
go test -count=1 -timeout 2h ./solver/placement -run 'ConstraintsHold|UnderConstraints|GroupsStayWhole|CopiesAreValid'
echo "=== a million undisturbed requests to the drift test"
go test -count=1 -timeout 30m ./solver -run 'TestDriftGoals$' -v -args -drift-steps 1000000
echo "=== drift tests that are made from few requests"
go test -count=1 -timeout 1h ./solver -run 'TestDriftFromFewRequests$' -v -args -drift-resamples 40 -drift-steps 50000
echo "=== 200,000 schedules inside the layer against the simulator, 1,000 searches against brute force"
go test -count=1 -timeout 1h ./solver/pipeline -run 'MakespansAreTheSimulators|SearchIsBruteForce' -v
echo "=== 10,000 random orders of events in roll-outs"
go test -count=1 -timeout 1h ./internal/rollout -run 'AnyOrder' -v
echo "=== a million requests to the request router, while engines, pods and plans fail and change"
go test -race -count=1 -timeout 3h ./internal/router -run 'TestFaults$' -v
echo "=== attacks on the memory of a request router, a minute each"
go test -count=1 -timeout 1h ./internal/router -run 'TestMemoryAttacks$' -v
echo "=== 100 random walks over specs"
go test -race -count=1 -timeout 3h ./test/specfields -v
for round in $(seq "$rounds"); do
  echo "=== end-to-end suite, round $round of $rounds"
  make e2e # in its own tier
done
echo "soak: passed"
