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
