package reshuffle

import (
	"context"
	"time"

	"github.com/go-logr/logr"
)

// progressInterval is how often progress is logged.
const progressInterval = 5 * time.Second

// logProgress logs how far the copy is, its rate and when it will end, until the returned function is called.
func logProgress(ctx context.Context, c *copier) (stop func()) {
	log := logr.FromContextOrDiscard(ctx)
	finished, ended := make(chan struct{}), make(chan struct{})
	start, already := time.Now(), c.done.Load()
	go func() {
		defer close(ended)
		ticker := time.NewTicker(progressInterval)
		defer ticker.Stop()
		for {
			select {
			case <-finished:
				return
			case <-ticker.C:
				done, elapsed := c.done.Load(), time.Since(start)
				log.Info("Reshuffling", "doneBytes", done, "totalBytes", c.total, "bytesPerSecond", rate(done-already, elapsed),
					"etaSeconds", eta(c.total-done, done-already, elapsed))
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
