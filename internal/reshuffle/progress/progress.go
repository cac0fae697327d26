// Package progress tells how far a long copy is.
package progress

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
)

// interval is how often progress is logged.
const interval = 5 * time.Second

// Log logs how much of total is done, its rate and when it will end, until the returned function is called.
func Log(ctx context.Context, total int64, count *atomic.Int64) (stop func()) {
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
				log.Info("Reshuffling", "doneBytes", done, "totalBytes", total, "bytesPerSecond", rate(done-already, elapsed),
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

// eta is the time that the rest will take at the rate so far; -1 while there is none.
func eta(left, done int64, elapsed time.Duration) int64 {
	if done <= 0 {
		return -1
	}
	return int64(float64(max(left, 0)) / float64(done) * elapsed.Seconds())
}
