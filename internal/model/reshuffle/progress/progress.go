// SPDX-License-Identifier: Apache-2.0

// Package progress logs the progress of a long copy.
package progress

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
)

// interval is the time between two log lines.
const interval = 5 * time.Second

// Log logs the number of bytes done, the rate and the estimated remaining time with a message, until the returned function is
// called.
func Log(ctx context.Context, message string, total int64, count *atomic.Int64) (stop func()) {
	log := logr.FromContextOrDiscard(ctx)
	finished, ended := make(chan struct{}), make(chan struct{})
	start, already := time.Now(), count.Load()
	go func() {
		defer close(ended)
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-finished:
				return
			case <-ticker.C:
				done, elapsed := count.Load(), time.Since(start)
				log.Info(message, "doneBytes", done, "totalBytes", total, "bytesPerSecond", rate(done-already, elapsed),
					"etaSeconds", eta(total-done, done-already, elapsed))
			}
		}
	}()
	return func() {
		close(finished)
		<-ended
	}
}

func rate(bytes int64, elapsed time.Duration) int64 {
	return int64(float64(bytes) / max(elapsed.Seconds(), 1e-3))
}

// eta estimates the remaining time in seconds from the average rate so far. It returns -1 if nothing has been done yet.
func eta(left, done int64, elapsed time.Duration) int64 {
	if done <= 0 {
		return -1
	}
	return int64(float64(max(left, 0)) / float64(done) * elapsed.Seconds())
}
