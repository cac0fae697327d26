// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/router"
	"github.com/semmoe/operator/internal/router/breaker"
)

// defaultQueueTimeout is the default of --queue-timeout.
const defaultQueueTimeout = 30 * time.Second

// maxAttemptsLimit is the maximum of --max-attempts.
const maxAttemptsLimit = 100

// resilienceFlags are the flags for the queue, the circuit breakers and the retries.
type resilienceFlags struct {
	queue       router.QueueOptions
	breaker     breaker.Settings
	maxAttempts int
}

func (f *resilienceFlags) add(command *cobra.Command) {
	flags, defaults := command.Flags(), breaker.Default()
	flags.IntVar(&f.queue.Size, "queue-size", 0, fmt.Sprintf("maximum number of requests that wait while all ranks are at --pending-limit-per-rank, up to %d; the next request is one of the highest priority in the header %s, of the client that was served least; 0 means that requests above the limit get status 429 at once", router.MaxQueueSize, router.HeaderPriority))
	flags.DurationVar(&f.queue.Timeout, "queue-timeout", defaultQueueTimeout, "maximum time that a request waits in the queue before it gets status 429, up to "+router.MaxQueueTimeout.String()+", with --queue-size")
	flags.IntVar(&f.queue.MaxPriority, "queue-max-priority", 0, fmt.Sprintf("highest priority that a client can request, 0 to %d; with 0, clients can only lower the priority of their requests, with --queue-size", router.MaxPriority))
	flags.IntVar(&f.breaker.ConsecutiveFailures, "breaker-consecutive-failures", defaults.ConsecutiveFailures, fmt.Sprintf("number of consecutive responses with a 5xx status other than 503 that eject a pod, 1 to %d", breaker.MaxConsecutiveFailures))
	flags.IntVar(&f.breaker.FailurePercent, "breaker-failure-percent", 0, "percentage of unsuccessful requests (5xx or broken connections, of at least 20 in 10 seconds) that ejects a pod; 0 means no limit")
	flags.DurationVar(&f.breaker.Ejection, "breaker-ejection", defaults.Ejection, "time of a first ejection, in which a pod gets no request while other pods can take it; doubles with each further ejection in a row")
	flags.DurationVar(&f.breaker.MaxEjection, "breaker-max-ejection", defaults.MaxEjection, "maximum time of an ejection")
	flags.IntVar(&f.breaker.HalfOpenRequests, "breaker-half-open-requests", 0, "maximum number of concurrent requests to a pod after an ejection, until it serves one of them; 0 means no limit")
	flags.IntVar(&f.maxAttempts, "max-attempts", router.DefaultMaxAttempts, fmt.Sprintf("maximum number of pods that receive a request if each of them breaks the connection before its response, 1 to %d", maxAttemptsLimit))
}

// complete sets the options of a router.
func (f *resilienceFlags) complete(command *cobra.Command, o *router.Options) error {
	if f.maxAttempts < 1 || f.maxAttempts > maxAttemptsLimit {
		return fmt.Errorf("--max-attempts is %d: want 1 to %d", f.maxAttempts, maxAttemptsLimit)
	}
	if f.queue.Size == 0 {
		for _, name := range []string{"queue-timeout", "queue-max-priority"} {
			if command.Flags().Changed(name) {
				return fmt.Errorf("--%s requires --queue-size", name)
			}
		}
		f.queue = router.QueueOptions{}
	}
	if o.EndpointPicker != nil && (f.queue.Size != 0 || command.Flags().Changed("max-attempts")) {
		return errors.New("--queue-size and --max-attempts cannot be combined with --endpoint-picker: the gateway sends the requests, and has its own deadlines")
	}
	o.Pool.Queue, o.Pool.Breaker, o.MaxAttempts = f.queue, f.breaker, f.maxAttempts
	return nil
}
