// SPDX-License-Identifier: Apache-2.0

package moedeployment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/decision"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/download"
	"github.com/semmoe/operator/controllers/moedeployment/planner"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/controllers/moedeployment/traffic"
	"github.com/semmoe/operator/internal/kube/lookup"
	"github.com/semmoe/operator/internal/model/hub/report"
	"github.com/semmoe/operator/internal/profile/inspection"
	"github.com/semmoe/operator/solver/drift"
)

// observe reads everything that every decision needs, once. An error that concerns only profiles, plans and tables is
// part of the snapshot: serving does not depend on them.
func (r *Reconciler) observe(ctx context.Context, moed *semmoev1.MoEDeployment) (*decision.Snapshot, error) {
	observed := &decision.Snapshot{Snapshot: planner.Snapshot{Now: r.Now(), Moed: moed}}
	if err := r.observeChildren(ctx, observed); err != nil {
		return nil, err
	}
	observed.Download = download.Observe(moed, jobsOf(observed.Jobs, semmoev1.ComponentDownload), observed.DownloadPods)
	if observed.Download.Complete() {
		observed.Inspection = inspection.Observe(inspectionInputs(moed).Hash(), jobsOf(observed.Jobs, semmoev1.ComponentInspect), observed.InspectPods)
	} else {
		observed.Download.Progress = r.downloadProgress(ctx, observed.Download.Running, observed.DownloadPods)
	}
	observed.Own, observed.OwnUnread = r.own(ctx, moed)
	if desired.UsesPlans(moed) {
		observed.StoreFailure = r.StoreWatch.Failure()
	}
	if decision.Invalid(observed) == nil {
		observed.Report = observed.Inspection.Report
	}
	observed.Unread = r.plans().Observe(ctx, &observed.Snapshot)
	return observed, nil
}

// jobsOf returns the Jobs of a component.
func jobsOf(jobs []*batchv1.Job, component string) []*batchv1.Job {
	var found []*batchv1.Job
	for _, job := range jobs {
		if job.Labels[semmoev1.LabelComponent] == component {
			found = append(found, job)
		}
	}
	return found
}

// downloadProgress requests the progress of a running download; nil if it is unknown.
func (r *Reconciler) downloadProgress(ctx context.Context, job *batchv1.Job, pods []*corev1.Pod) *report.Progress {
	for _, pod := range pods {
		if job == nil || !metav1.IsControlledBy(pod, job) || pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil || pod.Status.PodIP == "" {
			continue
		}
		var progress report.Progress
		err := lookup.Progress(ctx, r.HTTP, pod.Status.PodIP, download.ProgressPort, report.ProgressPath, &progress)
		if err == nil {
			return &progress
		}
		logr.FromContextOrDiscard(ctx).V(1).Info("Failed to query the progress of a download", "pod", pod.Name, "reason", err.Error())
	}
	return nil
}

// observeChildren reads the workloads, Jobs and pods of a MoEDeployment.
func (r *Reconciler) observeChildren(ctx context.Context, observed *decision.Snapshot) error {
	moed := observed.Moed
	ours := []client.ListOption{client.InNamespace(moed.Namespace), client.MatchingLabels{semmoev1.LabelDeployment: moed.Name}}
	var jobs batchv1.JobList
	var workloads appsv1.StatefulSetList
	var pods corev1.PodList
	if err := errors.Join(r.List(ctx, &jobs, ours...), r.List(ctx, &workloads, ours...), r.List(ctx, &pods, ours...)); err != nil {
		return fmt.Errorf("failed to list children: %w", err)
	}
	for i := range jobs.Items {
		if metav1.IsControlledBy(&jobs.Items[i], moed) {
			observed.Jobs = append(observed.Jobs, &jobs.Items[i])
		}
	}
	for i := range workloads.Items {
		if workload := &workloads.Items[i]; metav1.IsControlledBy(workload, moed) && workload.DeletionTimestamp == nil {
			observed.Workloads = append(observed.Workloads, revisions.StatefulSet(workload))
		}
	}
	groups, known, err := r.listGroups(ctx, moed)
	if err != nil {
		return err
	}
	observed.Workloads, observed.Groups = append(observed.Workloads, groups...), known
	slices.SortFunc(observed.Workloads, func(a, b *revisions.Workload) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for i := range pods.Items {
		switch pods.Items[i].Labels[semmoev1.LabelComponent] {
		case semmoev1.ComponentEngine:
			observed.Pods = append(observed.Pods, &pods.Items[i])
		case semmoev1.ComponentWorker:
			observed.Workers = append(observed.Workers, &pods.Items[i])
		case semmoev1.ComponentInspect:
			observed.InspectPods = append(observed.InspectPods, &pods.Items[i])
		case semmoev1.ComponentDownload:
			observed.DownloadPods = append(observed.DownloadPods, &pods.Items[i])
		case semmoev1.ComponentRouter:
			observed.RouterPods = append(observed.RouterPods, &pods.Items[i])
		}
	}
	for i, leader := range observed.Pods {
		observed.Pods[i] = revisions.AsReplica(leader, observed.Workers, observed.Now)
	}
	router := &appsv1.Deployment{}
	err = r.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: desired.RouterName(moed)}, router)
	if err == nil {
		observed.Router = router
	}
	return client.IgnoreNotFound(err)
}

// answer adds the answer to a question of a decision to the snapshot.
func (r *Reconciler) answer(ctx context.Context, s *decision.Snapshot, question planner.Question) error {
	switch q := question.(type) {
	case decision.RouterReports:
		s.Reports = new(traffic.ReadRouters(ctx, r.Routers.HTTP, s.RouterPods))
	case decision.PrometheusValues:
		values := traffic.Prometheus{Client: r.Prometheus, Secrets: r.Secrets, Namespace: r.Namespace}.Ask(ctx, s.Moed, q.Since, s.Now)
		s.Prometheus = &values
	case decision.Calibration:
		if s.Calibrations == nil {
			s.Calibrations = map[string]*drift.Calibration{}
		}
		s.Calibrations[q.Plan.Status.PlanDigest] = traffic.CalibrationOf(ctx, r.Client, q.Plan)
	default:
		return r.plans().Answer(ctx, &s.Snapshot, question)
	}
	return nil
}
