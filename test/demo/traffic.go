package main

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/semmoe/operator/test/corpus"
)

const (
	// clients is how many send requests at the same time while something is waited for, thinkTime how long each of them waits
	// after an answer: some fifteen requests a second, which leave two cores time for what is waited for.
	clients   = 4
	thinkTime = 200 * time.Millisecond
)

// during runs f while clients send the requests again and again, in a seeded random order. A request that fails is entered in the
// ledger, and the next one is sent. It returns once the last one is answered.
func (d *demo) during(ctx context.Context, requests []corpus.Request, f func() error) error {
	stop := make(chan struct{})
	order := rand.New(rand.NewPCG(orderSeed, 0)).Perm(len(requests))
	var next atomic.Int64
	var sending sync.WaitGroup
	for range clients {
		sending.Go(func() {
			for {
				index := order[int(next.Add(1)-1)%len(order)]
				d.complete(ctx, requests[index].Text) //nolint:errcheck // it is in the ledger
				select {
				case <-stop:
					return
				case <-ctx.Done():
					return
				case <-time.After(thinkTime):
				}
			}
		})
	}
	err := f()
	close(stop)
	sending.Wait()
	return err
}
