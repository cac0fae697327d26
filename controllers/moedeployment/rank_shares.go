// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"cmp"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// rankShares returns the share of each rank in thousandths, from the token count per rank; nil without tokens. It
// ignores ranks that the spec does not have, which belong to an older revision. The rounding remainder goes to the
// largest remainders, so that the shares sum to 1000.
func rankShares(tokens map[int]int64, ranks int32) []semmoev1.RankShare {
	var total int64
	for rank := range ranks {
		total += tokens[int(rank)]
	}
	if total <= 0 {
		return nil
	}
	shares, order := make([]semmoev1.RankShare, ranks), make([]int32, ranks)
	left := int32(1000)
	for rank := range ranks {
		shares[rank] = semmoev1.RankShare{Rank: rank, ShareMilli: int32(1000 * tokens[int(rank)] / total)}
		order[rank] = rank
		left -= shares[rank].ShareMilli
	}
	remainder := func(rank int32) int64 { return 1000 * tokens[int(rank)] % total }
	slices.SortStableFunc(order, func(a, b int32) int { return cmp.Compare(remainder(b), remainder(a)) })
	for _, rank := range order[:left] {
		shares[rank].ShareMilli++
	}
	return shares
}

// routingStatus returns the reported distribution over ranks. It keeps the previous report until a share differs by a
// step and one minute has passed.
func routingStatus(previous *semmoev1.RoutingStatus, o observation, ranks int32, observes bool, now time.Time) *semmoev1.RoutingStatus {
	known := previous != nil && previous.ObservedTime != nil && previous.ObservedRevision == o.ServingRevision()
	shares := rankShares(o.RankTokens, ranks)
	switch {
	case !observes:
		return nil
	case !o.Enough || shares == nil:
		if known {
			return previous
		}
		return nil
	case known && (!sharesMoved(previous.Ranks, shares) || justReported(previous.ObservedTime, now)):
		return previous
	}
	return &semmoev1.RoutingStatus{Ranks: shares, ObservedTime: new(metav1.NewTime(now.Truncate(time.Second))), ObservedRevision: o.ServingRevision()}
}

// sharesMoved reports whether the share of a rank differs by a step, or whether the set of ranks changed.
func sharesMoved(before, after []semmoev1.RankShare) bool {
	return !slices.EqualFunc(before, after, func(a, b semmoev1.RankShare) bool {
		change := a.ShareMilli - b.ShareMilli
		return a.Rank == b.Rank && max(change, -change) < larStep
	})
}
