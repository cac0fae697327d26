// SPDX-License-Identifier: Apache-2.0

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
	// clients is the number of concurrent clients of background traffic, thinkTime the pause of each client after an
	// answer. Together they send about fifteen requests per second, which leaves processor time on two cores for the
	// operator.
	clients   = 4
	thinkTime = 200 * time.Millisecond
)

// wave is the number of requests that duringWaves sends at the same time.
const wave = 16

// duringWaves runs f while waves of requests are sent again and again. The requests of a wave share the steps of the
// engines: with only a few tokens in a step, equal shards leave little choice of ranks. A failed request is recorded in
// the ledger. duringWaves returns after f has returned and the last request is answered.
func (d *demo) duringWaves(ctx context.Context, requests []corpus.Request, f func() error) error {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		order := rand.New(rand.NewPCG(orderSeed, 0)).Perm(len(requests))
		for begin := 0; ; begin += wave {
			var sending sync.WaitGroup
			for i := range wave {
				sending.Go(func() { d.complete(ctx, requests[order[(begin+i)%len(order)]].Text) }) //nolint:errcheck // recorded in the ledger
			}
			sending.Wait()
			select {
			case <-stop:
				return
			case <-ctx.Done():
				return
			default:
			}
		}
	}()
	err := f()
	close(stop)
	<-stopped
	return err
}

// during runs f while clients repeatedly send the requests in a seeded random order. A failed request is recorded in
// the ledger and does not stop the traffic. during returns after f has returned and the last request is answered.
func (d *demo) during(ctx context.Context, requests []corpus.Request, f func() error) error {
	stop := make(chan struct{})
	order := rand.New(rand.NewPCG(orderSeed, 0)).Perm(len(requests))
	var next atomic.Int64
	var sending sync.WaitGroup
	for range clients {
		sending.Go(func() {
			for {
				index := order[int(next.Add(1)-1)%len(order)]
				d.complete(ctx, requests[index].Text) //nolint:errcheck // recorded in the ledger
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
