// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/writes"
)

// answers reports whether it can be proven that a plan does not change the model's outputs.
type answers struct {
	// Missing is why it cannot be proven; empty if the baseline outputs are stored.
	Missing string
	// Stranded reports that pods of the current workloads wait for the baseline outputs, and no replica is left to
	// produce them.
	Stranded bool
	// Again is the delay until the next attempt; zero if an event triggers it.
	Again time.Duration
}

// baselineOutputs reports whether the model's baseline outputs are stored, and asks for them if a pod can produce them.
// It deletes unused outputs of other checkpoints.
func (d *Decision) baselineOutputs(s *Snapshot) answers {
	name := revisions.AnswersName(s.Moed, s.Report.ModelDigest)
	present := false
	for _, stored := range s.StoredOutputs {
		switch {
		case stored.Name == name:
			present = stored.DeletionTimestamp == nil
		case metav1.IsControlledBy(stored, s.Moed) && stored.DeletionTimestamp == nil && !mountsConfigMap(s.Workloads, stored.Name):
			d.write(writes.Delete{Object: stored})
		}
	}
	pod := revisions.BaselinePod(s.Pods, s.Report.ModelDigest)
	switch {
	case present:
		return answers{}
	case pod == nil:
		return answers{Missing: "it waits for a replica that serves without a plan", Stranded: mountsConfigMap(s.Workloads, name)}
	case desired.Paused(s.Moed):
		return answers{Missing: "set spec.reconciliation to Active"}
	case s.Outputs == nil:
		d.Question = BaselineOutputs{Pod: pod}
		return answers{}
	}
	if s.Outputs.Refused != nil {
		d.refuse(s.Outputs.Refused)
	}
	return answers{Missing: s.Outputs.Missing, Again: s.Outputs.Again}
}

// mountsConfigMap reports whether the pods of a workload mount a ConfigMap.
func mountsConfigMap(workloads []*revisions.Workload, name string) bool {
	for _, workload := range workloads {
		if slices.ContainsFunc(workload.Template().Spec.Volumes, func(v corev1.Volume) bool { return v.ConfigMap != nil && v.ConfigMap.Name == name }) {
			return true
		}
	}
	return false
}

// recordChangedOutputs records the differences that probes found on the plans, which outlive the pods, and returns all
// known differences by revision. The record is required: later writes may remove the pods that report a difference.
func (d *Decision) recordChangedOutputs(s *Snapshot) map[string]string {
	changed := revisions.ChangedOutputs(s.Pods)
	for _, plan := range appendPlan(s.Plans, d.Plan) {
		found := map[string]string{}
		for _, workload := range s.Workloads {
			revision := workload.Labels[semmoev1.LabelRevision]
			if difference := changed[revision]; difference != "" && mounts(workload, plan) && plan.Annotations[semmoev1.AnnotationOutputChanged+revision] == "" {
				found[semmoev1.AnnotationOutputChanged+revision] = difference
			}
		}
		if len(found) > 0 {
			d.write(writes.Annotate{Object: plan, Annotations: found, Required: true})
		}
		maps.Copy(found, plan.Annotations)
		for key, difference := range found {
			if revision, ok := strings.CutPrefix(key, semmoev1.AnnotationOutputChanged); ok {
				changed[revision] = difference
			}
		}
	}
	return changed
}
