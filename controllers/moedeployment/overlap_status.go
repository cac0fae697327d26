// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"cmp"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/internal/kube/printable"
)

// overlapStatus reports the overlap settings of the serving revision, and the decision on them; nil without mode Auto.
func overlapStatus(moed *semmoev1.MoEDeployment, o observation) *semmoev1.OverlapStatus {
	if !moed.Spec.Engine.Overlap.Chosen() {
		return nil
	}
	why := cmp.Or(o.Planning.Overlap.Why, planner.OverlapWhy(o.Served))
	status := &semmoev1.OverlapStatus{Reason: why.Reason, Message: printable.Line(why.Message, maxBatchMessage)}
	if o.Served == nil {
		return status
	}
	basis := planner.BasisOf(o.Served)
	in := o.Served.Overlap
	status.MicroBatches, status.ThresholdTokens, status.CommunicationSMs = in.MicroBatches, in.DecodeThresholdTokens, in.CommunicationSMs
	status.BatchTokens, status.LayerNanos, status.UnsplitNanos = basis.BatchTokens, basis.LayerNanos, basis.UnsplitNanos
	return status
}
