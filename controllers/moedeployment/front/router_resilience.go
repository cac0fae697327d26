// SPDX-License-Identifier: Apache-2.0

package front

import (
	"fmt"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// resilienceArgs returns the arguments for the queue, the circuit breakers and the retries of a request router.
func resilienceArgs(routing semmoev1.RoutingSpec) (args []string) {
	add := func(format string, value *int32) {
		if value != nil {
			args = append(args, fmt.Sprintf(format, *value))
		}
	}
	if queue := routing.Queue; queue != nil {
		add("--queue-size=%d", &queue.Size)
		add("--queue-timeout=%ds", queue.TimeoutSeconds)
		add("--queue-max-priority=%d", queue.MaxPriority)
	}
	if breaker := routing.CircuitBreaker; breaker != nil {
		add("--breaker-consecutive-failures=%d", breaker.ConsecutiveFailures)
		add("--breaker-failure-percent=%d", breaker.FailurePercent)
		add("--breaker-ejection=%ds", breaker.EjectionSeconds)
		add("--breaker-max-ejection=%ds", breaker.MaxEjectionSeconds)
		add("--breaker-half-open-requests=%d", breaker.HalfOpenRequests)
	}
	add("--max-attempts=%d", routing.MaxAttempts)
	return args
}
