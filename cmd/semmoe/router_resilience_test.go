// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/breaker"
)

func TestResilienceFlags(t *testing.T) {
	settings := func(change func(*breaker.Settings)) breaker.Settings {
		s := breaker.Default()
		change(&s)
		return s
	}
	for name, tc := range map[string]struct {
		args     []string
		queue    router.QueueOptions
		breaker  breaker.Settings
		attempts int
		err      string
	}{
		"defaults": {nil, router.QueueOptions{}, breaker.Default(), 3, ""},
		"queue":    {[]string{"--queue-size=10"}, router.QueueOptions{Size: 10, Timeout: 30 * time.Second}, breaker.Default(), 3, ""},
		"all": {[]string{"--queue-size=10", "--queue-timeout=5s", "--queue-max-priority=7", "--breaker-consecutive-failures=5", "--breaker-failure-percent=50",
			"--breaker-ejection=2s", "--breaker-max-ejection=1m", "--breaker-half-open-requests=1", "--max-attempts=1"},
			router.QueueOptions{Size: 10, Timeout: 5 * time.Second, MaxPriority: 7},
			settings(func(s *breaker.Settings) {
				*s = breaker.Settings{ConsecutiveFailures: 5, FailurePercent: 50, Ejection: 2 * time.Second, MaxEjection: time.Minute, HalfOpenRequests: 1}
			}), 1, ""},
		"no attempt":           {[]string{"--max-attempts=0"}, router.QueueOptions{}, breaker.Settings{}, 0, "--max-attempts is 0: want 1 to 100"},
		"timeout of no queue":  {[]string{"--queue-timeout=5s"}, router.QueueOptions{}, breaker.Settings{}, 0, "--queue-timeout requires --queue-size"},
		"priority of no queue": {[]string{"--queue-max-priority=5"}, router.QueueOptions{}, breaker.Settings{}, 0, "--queue-max-priority requires --queue-size"},
	} {
		t.Run(name, func(t *testing.T) {
			var flags resilienceFlags
			command := newRouterCommand()
			command.ResetFlags()
			flags.add(command)
			if err := command.ParseFlags(tc.args); err != nil {
				t.Fatal(err)
			}
			var options router.Options
			err := flags.complete(command, &options)
			if tc.err != "" {
				if err == nil || err.Error() != tc.err {
					t.Errorf("error %v, want %q", err, tc.err)
				}
				return
			}
			if err != nil || options.Pool.Queue != tc.queue || options.Pool.Breaker != tc.breaker || options.MaxAttempts != tc.attempts {
				t.Errorf("error %v, options %+v, %+v, %d attempts", err, options.Pool.Queue, options.Pool.Breaker, options.MaxAttempts)
			}
		})
	}
	for want, flags := range map[string][]string{
		"a queue needs a limit":                      {"--queue-size=10"},
		"--queue-size and --max-attempts cannot be":  {"--endpoint-picker", "--queue-size=10"},
		"queue.timeout: 1h0m0s is invalid":           {"--pending-limit-per-rank=1", "--queue-size=10", "--queue-timeout=1h"},
		"maxEjection: 8s is invalid: it must be 10s": {"--breaker-ejection=10s"},
	} {
		if got := refusal(t, flags...); !strings.Contains(got, want) {
			t.Errorf("%v: error %v, want %q", flags, got, want)
		}
	}
}
