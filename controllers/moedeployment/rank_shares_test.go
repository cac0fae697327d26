// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
)

func shares(milli ...int32) []semmoev1.RankShare {
	var list []semmoev1.RankShare
	for rank, share := range milli {
		list = append(list, semmoev1.RankShare{Rank: int32(rank), ShareMilli: share})
	}
	return list
}

func TestRankShares(t *testing.T) {
	cases := map[string]struct {
		tokens map[int]int64
		ranks  int32
		want   []semmoev1.RankShare
	}{
		"nothing":                         {nil, 4, nil},
		"only of another revision's rank": {map[int]int64{7: 5}, 4, nil},
		"even":                            {map[int]int64{0: 5, 1: 5, 2: 5, 3: 5}, 4, shares(250, 250, 250, 250)},
		"one gets nothing":                {map[int]int64{0: 30, 2: 10}, 3, shares(750, 0, 250)},
		"thirds":                          {map[int]int64{0: 1, 1: 1, 2: 1}, 3, shares(334, 333, 333)},
		"the largest remainder":           {map[int]int64{0: 1, 1: 2}, 2, shares(333, 667)},
		"one rank":                        {map[int]int64{0: 9}, 1, shares(1000)},
		"many tokens":                     {map[int]int64{0: 3 << 50, 1: 1 << 50}, 2, shares(750, 250)},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, rankShares(tc.tokens, tc.ranks)); diff != "" {
				t.Errorf("shares (-want +got):\n%s", diff)
			}
		})
	}
}

// Shares sum to the whole, and each differs from the exact value only by rounding.
func TestRankSharesSum(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		ranks := 1 + random.Int32N(1024)
		tokens, total := map[int]int64{}, int64(0)
		for rank := range int(ranks) {
			if random.IntN(4) > 0 {
				tokens[rank] = random.Int64N(1 << random.IntN(30))
			}
			total += tokens[rank]
		}
		got, sum := rankShares(tokens, ranks), int32(0)
		if total == 0 {
			continue
		}
		for _, share := range got {
			sum += share.ShareMilli
			exact := float64(1000) * float64(tokens[int(share.Rank)]) / float64(total)
			if distance := float64(share.ShareMilli) - exact; distance <= -1 || distance >= 1 {
				t.Fatalf("rank %d has %d milli, exactly %f", share.Rank, share.ShareMilli, exact)
			}
		}
		if sum != 1000 || len(got) != int(ranks) {
			t.Fatalf("%d shares of %d ranks sum to %d", len(got), ranks, sum)
		}
	}
}

// The reported shares change by steps of at least 20 milli, at most once a minute, within one revision.
func TestRoutingStatus(t *testing.T) {
	at := func(after time.Duration, milli ...int32) *semmoev1.RoutingStatus {
		return &semmoev1.RoutingStatus{Ranks: shares(milli...), ObservedTime: &metav1.Time{Time: moedtest.Start.Add(after)}, ObservedRevision: "r1"}
	}
	previous, other := at(0, 500, 500), at(0, 500, 500)
	other.ObservedRevision = "r0"
	cases := map[string]struct {
		previous *semmoev1.RoutingStatus
		tokens   map[int]int64
		few, off bool
		ranks    int32
		after    time.Duration
		want     *semmoev1.RoutingStatus
	}{
		"first":                     {tokens: map[int]int64{0: 1, 1: 1}, want: previous},
		"too few, first":            {tokens: map[int]int64{0: 1, 1: 1}, few: true},
		"too few, same revision":    {previous: previous, few: true, after: time.Hour, want: previous},
		"too few, another revision": {previous: other, few: true, after: time.Hour},
		"nothing is sampled":        {previous: previous, off: true, tokens: map[int]int64{0: 1}, after: time.Hour},
		"small change":              {previous: previous, tokens: map[int]int64{0: 519, 1: 481}, after: time.Hour, want: previous},
		"change":                    {previous: previous, tokens: map[int]int64{0: 480, 1: 520}, after: time.Hour, want: at(time.Hour, 480, 520)},
		"change within the minute":  {previous: previous, tokens: map[int]int64{0: 1}, after: 59 * time.Second, want: previous},
		"change after the minute":   {previous: previous, tokens: map[int]int64{0: 1}, after: time.Minute, want: at(time.Minute, 1000, 0)},
		"the clock was set back":    {previous: previous, tokens: map[int]int64{0: 1}, after: -6 * time.Hour, want: at(-6*time.Hour, 1000, 0)},
		"another revision, at once": {previous: other, tokens: map[int]int64{0: 1}, after: time.Second, want: at(time.Second, 1000, 0)},
		"more ranks":                {previous: previous, tokens: map[int]int64{0: 1, 1: 1}, ranks: 3, after: time.Hour, want: at(time.Hour, 500, 500, 0)},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			ranks := max(tc.ranks, 2)
			got := routingStatus(tc.previous, observation{Decision: decision.Decision{Revision: "r1"}, RankTokens: tc.tokens, Enough: !tc.few}, ranks, !tc.off, moedtest.Start.Add(tc.after))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("routing (-want +got):\n%s", diff)
			}
		})
	}
}
