// SPDX-License-Identifier: Apache-2.0

package plans

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/kube/writes"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// shell observes, decides and writes as the controller does.
type shell struct {
	client.Client
	HTTP       *http.Client
	Now        func() time.Time
	BatchSizes []int32
	snapshot   *planner.Snapshot
}

// shellOn returns a shell with these objects in its cluster, and the fixtures' MoEDeployment if there is no other.
func shellOn(t *testing.T, funcs interceptor.Funcs, objects ...client.Object) *shell {
	t.Helper()
	if !slices.ContainsFunc(objects, func(o client.Object) bool { _, is := o.(*semmoev1.MoEDeployment); return is }) {
		objects = append(objects, moedtest.Deployment())
	}
	return &shell{Client: interceptor.NewClient(moedtest.Cluster(t, objects...), funcs), Now: func() time.Time { return moedtest.Start }}
}

func (sh *shell) writer() childobjects.Writer {
	return childobjects.Writer{Client: sh.Client, Live: sh.Client, Recorder: events.NewFakeRecorder(16)}
}

// answered answers the questions of a decision until there is none left.
func (sh *shell) answered(ctx context.Context, decide func() planner.Question) error {
	reader := &Reader{Client: sh.Client, Live: sh.Client, HTTP: sh.HTTP}
	for question := decide(); question != nil; question = decide() {
		if err := reader.Answer(ctx, sh.snapshot, question); err != nil {
			return err
		}
	}
	return nil
}

// Plan decides on profiles and plans, and writes them.
func (sh *shell) Plan(ctx context.Context, moed *semmoev1.MoEDeployment, report checkpoint.Report, workloads []*revisions.Workload, pods []*corev1.Pod) (planner.Planning, error) {
	sh.snapshot = &planner.Snapshot{Now: sh.Now(), Moed: moed, Report: &report, Workloads: workloads, Pods: pods, BatchSizes: sh.BatchSizes}
	if err := (&Reader{Client: sh.Client, Live: sh.Client}).Observe(ctx, sh.snapshot); err != nil {
		return planner.Planning{}, err
	}
	var d planner.Decision
	if err := sh.answered(ctx, func() planner.Question { d = planner.Decide(sh.snapshot); return d.Question }); err != nil {
		return d.Planning, err
	}
	refused, err := Apply(ctx, sh.writer(), sh.snapshot, d.Writes)
	if refused != nil {
		d = planner.Decide(sh.snapshot)
	}
	return d.Planning, errors.Join(d.Refused, d.Err, refused, err)
}

// Replan takes the next step after a drift.
func (sh *shell) Replan(ctx context.Context, p planner.Planning, drift planner.DriftSignal) error {
	var writes []writes.Write
	if err := sh.answered(ctx, func() (q planner.Question) { _, writes, q = planner.NextReplan(sh.snapshot, p, drift); return q }); err != nil {
		return err
	}
	for _, write := range writes {
		if err := sh.writer().Write(ctx, sh.snapshot.Moed, write); err != nil {
			return err
		}
	}
	return nil
}

// ours makes an object a child of the fixtures' MoEDeployment.
func ours(object client.Object) {
	object.SetLabels(desired.Labels(moedtest.Deployment(), semmoev1.ComponentPlan))
	object.SetOwnerReferences(ownership.ControllerReference(moedtest.Deployment(), "MoEDeployment"))
}

func nameOf(plan *semmoev1.PlacementPlan) string {
	if plan == nil {
		return ""
	}
	return plan.Name
}

// workloadUnder returns the workload of a revision under the plan, which may be nil.
func workloadUnder(t *testing.T, plan *semmoev1.PlacementPlan, replicas int32) *revisions.Workload {
	t.Helper()
	var under *revisions.Layout
	if plan != nil {
		under = revisions.LayoutOf(plan, semmoev1.RealizationEngineMap)
	}
	workload, err := revisions.Render(moedtest.Deployment(), "r1", moedtest.Report(), under, revisions.Own{Image: "semmoe:1"})
	if err != nil {
		t.Fatal(err)
	}
	*workload.Replicas() = replicas
	return workload
}

// trial marks a workload as not proven.
func trial(workload *revisions.Workload) *revisions.Workload {
	metav1.SetMetaDataAnnotation(workload.ObjectMeta, semmoev1.AnnotationRollout, semmoev1.RolloutCanary)
	return workload
}

func unsolved(p *semmoev1.PlacementPlan) { p.Status = semmoev1.PlacementPlanStatus{} }

// replanOf returns a plan made for drift, of a tier, that replaces the plan with digest current.
func replanOf(name, digest, current string, tier semmoev1.Tier, made time.Time, change ...func(*semmoev1.PlacementPlan)) *semmoev1.PlacementPlan {
	return moedtest.PlanOf(name, digest, func(p *semmoev1.PlacementPlan) {
		p.Labels = map[string]string{semmoev1.LabelBase: "base"}
		p.CreationTimestamp = metav1.NewTime(made)
		p.Spec.ProfileRef.Name = "of-" + name
		p.Spec.Current = &semmoev1.CurrentPlan{PlanDigest: current + "-full"}
		p.Status.Tier = tier
		for _, c := range change {
			c(p)
		}
	})
}
