// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"fmt"

	"github.com/semmoe/operator/solver/dispatch"
)

// A scheduler with the policy price sends a request to the rank of its experts, until that rank has too much load.
func ExampleScheduler() {
	scheduler, err := dispatch.NewScheduler(dispatch.Options{
		Policy: dispatch.Price, Ranks: 2, Cap: 1.25, Weights: dispatch.DefaultWeights, Costs: dispatch.Costs{Exchange: 50, Compute: 20},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	// 70% of the activations of each request are local on rank 1.
	request := &dispatch.Request{Scores: []float32{0.3, 0.7}, Tokens: 100, Prompt: 80}
	places := []dispatch.Place{{Rank: 0}, {Rank: 1}}
	requests := make([]int, len(places))
	for range 100 {
		decision := scheduler.Decide(request, places)
		scheduler.Take(request, &decision)
		requests[decision.Rank]++
	}
	fmt.Println("requests by rank:", requests)
	// Output:
	// requests by rank: [46 54]
}
