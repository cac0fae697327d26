// SPDX-License-Identifier: Apache-2.0

package front

import (
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// TestRouterResilience checks the arguments for the queue, the circuit breakers and the retries.
func TestRouterResilience(t *testing.T) {
	for name, tc := range map[string]struct {
		routing semmoev1.RoutingSpec
		want    string
	}{
		"defaults":      {semmoev1.RoutingSpec{}, ""},
		"only the size": {semmoev1.RoutingSpec{Queue: &semmoev1.RoutingQueue{Size: 100}}, "--queue-size=100"},
		"queue": {semmoev1.RoutingSpec{Queue: &semmoev1.RoutingQueue{Size: 100, TimeoutSeconds: new(int32(60)), MaxPriority: new(int32(10))}},
			"--queue-size=100 --queue-timeout=60s --queue-max-priority=10"},
		"circuit breaker": {semmoev1.RoutingSpec{CircuitBreaker: &semmoev1.RoutingCircuitBreaker{
			ConsecutiveFailures: new(int32(5)), FailurePercent: new(int32(50)), EjectionSeconds: new(int32(10)), MaxEjectionSeconds: new(int32(60)), HalfOpenRequests: new(int32(1))}},
			"--breaker-consecutive-failures=5 --breaker-failure-percent=50 --breaker-ejection=10s --breaker-max-ejection=60s --breaker-half-open-requests=1"},
		"attempts": {semmoev1.RoutingSpec{MaxAttempts: new(int32(1))}, "--max-attempts=1"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := strings.Join(resilienceArgs(tc.routing), " "); got != tc.want {
				t.Errorf("arguments %q, want %q", got, tc.want)
			}
		})
	}
}
