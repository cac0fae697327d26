// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/observation/lar"
)

// own returns the settings of the operator's own containers in the pods of a new revision. It omits the artifact store
// if none is configured: engines also serve without tables.
func (r *Reconciler) own(ctx context.Context, moed *semmoev1.MoEDeployment) (revisions.Own, error) {
	needs := revisions.Own{Image: r.Image, PullPolicy: r.PullPolicy}
	if !desired.Shuffles(moed) {
		return needs, nil
	}
	authority, err := r.front().StoreAuthority(ctx, moed)
	if err == nil && authority != "" {
		needs.Store = r.Store.Env(authority)
	}
	return needs, err
}

// shuffleText returns sentences to append to a message: in how many pods the engine received the tables for shuffling
// tokens, and how many engines report that they use the tables. It returns "" if the spec does not shuffle tokens.
func shuffleText(moed *semmoev1.MoEDeployment, o observation) string {
	if !desired.Shuffles(moed) {
		return ""
	}
	pods, given, why := 0, 0, ""
	for _, pod := range append(append([]*corev1.Pod(nil), o.Pods...), o.Workers...) {
		if pod.Labels[semmoev1.LabelRevision] != o.Revision || pod.DeletionTimestamp != nil {
			continue
		}
		pods++
		switch missing, ended := revisions.MissingTables(pod); {
		case ended && missing == "":
			given++
		case ended:
			why = fmt.Sprintf("; pod %s: %s", pod.Name, missing)
		}
	}
	return fmt.Sprintf(". %d of %d pods received the tables for shuffling tokens%s", given, pods, why) + consumersText(o)
}

// consumersText returns a sentence to append to a message: what engines of the revision report about the tables; "" if
// none reports anything.
func consumersText(o observation) string {
	p, engines := o.Planning, lar.EnginesOf(o.Reports, o.Revision)
	if p.Serving == nil || !slices.ContainsFunc(engines, func(e lar.EngineCounts) bool { return e.Tables != "" || e.Refused != "" || e.Problem != "" }) {
		return ""
	}
	tables, use, why := decision.TablesOf(p), 0, ""
	for _, engine := range engines {
		if text := locality.ConsumerText(engine, tables); text != "" {
			why = fmt.Sprintf("; pod %s: %s", engine.Pod, text)
			continue
		}
		use++
	}
	return fmt.Sprintf(". %d use the tables of plan %s%s", use, artifact.Digest(tables).Short(), why)
}
