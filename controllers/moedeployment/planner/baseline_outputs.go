package planner

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/kube/ownership"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/probe"
)

const (
	// recordTimeout is how long a reconciliation waits for a model's outputs; recordAgain is the delay until the next
	// attempt.
	recordTimeout = 45 * time.Second
	recordAgain   = 10 * time.Second
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

// reconcileAnswers ensures that the model's baseline outputs are stored, and deletes unused outputs of other
// checkpoints. The result is valid even with a RefusedError.
func (pl *Planner) reconcileAnswers(ctx context.Context, moed *semmoev1.MoEDeployment, report checkpoint.Report, workloads []*revisions.Workload, pods []*corev1.Pod, active bool) (answers, error) {
	name := revisions.AnswersName(moed, report.ModelDigest)
	var stored corev1.ConfigMapList
	if err := pl.List(ctx, &stored, client.InNamespace(moed.Namespace), client.MatchingLabels(desired.Selector(moed, semmoev1.ComponentAnswers))); err != nil {
		return answers{}, fmt.Errorf("failed to list stored answers: %w", err)
	}
	present := false
	var refused error
	for i := range stored.Items {
		item := &stored.Items[i]
		switch {
		case item.Name == name:
			present = item.DeletionTimestamp == nil
		case active && metav1.IsControlledBy(item, moed) && !mountsConfigMap(workloads, item.Name):
			if err := deleteAll(ctx, pl.Client, []*corev1.ConfigMap{item}); IsRefused(err) {
				refused = errors.Join(refused, err)
			} else if err != nil {
				return answers{}, err
			}
		}
	}
	if present {
		return answers{}, refused
	}
	pod := revisions.BaselinePod(pods, report.ModelDigest)
	switch {
	case pod == nil:
		return answers{Missing: "it waits for a replica that serves without a plan", Stranded: mountsConfigMap(workloads, name)}, refused
	case !active:
		return answers{Missing: "set spec.reconciliation to Active"}, refused
	}
	recorded, err := pl.record(ctx, moed, pod, report.ModelDigest)
	if err != nil {
		return answers{Missing: fmt.Sprintf("pod %s did not return the baseline outputs: %v", pod.Name, err), Again: recordAgain}, refused
	}
	err = pl.Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: moed.Namespace, Name: name,
			Labels:          desired.Labels(moed, semmoev1.ComponentAnswers),
			OwnerReferences: ownership.ControllerReference(moed, "MoEDeployment"),
		},
		Immutable: new(true),
		Data:      map[string]string{revisions.AnswersFile: string(recorded)},
	}, client.FieldOwner(desired.Manager))
	if err == nil || apierrors.IsAlreadyExists(err) {
		return answers{}, refused
	}
	err = refusable(fmt.Errorf("failed to create ConfigMap %s: %w", name, err))
	return answers{Missing: fmt.Sprintf("the baseline outputs cannot be stored: %v", err)}, errors.Join(refused, err)
}

// record requests the model's outputs from a pod.
func (pl *Planner) record(ctx context.Context, moed *semmoev1.MoEDeployment, pod *corev1.Pod, modelDigest string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	engine := &probe.Client{
		Address: "http://" + net.JoinHostPort(pod.Status.PodIP, pod.Annotations[semmoev1.AnnotationPort]),
		Model:   revisions.Launch(moed).ServedModelName, HTTP: pl.HTTP,
	}
	recorded, err := probe.Record(ctx, engine, modelDigest)
	if err != nil {
		return nil, err
	}
	return recorded.Encode()
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
// known differences by revision.
func (pl *Planner) recordChangedOutputs(ctx context.Context, workloads []*revisions.Workload, pods []*corev1.Pod, plans []*semmoev1.PlacementPlan) (map[string]string, error) {
	changed := revisions.ChangedOutputs(pods)
	for _, plan := range plans {
		base := plan.DeepCopy()
		for _, workload := range workloads {
			revision := workload.Labels[semmoev1.LabelRevision]
			if difference := changed[revision]; difference != "" && mounts(workload, plan) && plan.Annotations[semmoev1.AnnotationOutputChanged+revision] == "" {
				metav1.SetMetaDataAnnotation(&plan.ObjectMeta, semmoev1.AnnotationOutputChanged+revision, difference)
			}
		}
		if len(plan.Annotations) != len(base.Annotations) {
			if err := pl.Patch(ctx, plan, client.MergeFrom(base), client.FieldOwner(desired.Manager)); err != nil {
				return nil, fmt.Errorf("failed to annotate PlacementPlan %s: %w", plan.Name, err)
			}
		}
		for key, difference := range plan.Annotations {
			if revision, ok := strings.CutPrefix(key, semmoev1.AnnotationOutputChanged); ok {
				changed[revision] = difference
			}
		}
	}
	return changed, nil
}
