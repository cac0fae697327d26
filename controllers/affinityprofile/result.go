// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/lookup"
	"github.com/semmoe/operator/internal/kube/printable"
	recording "github.com/semmoe/operator/internal/profile"
)

// findResult reads the result of these inputs from the store. It returns nil if there is none.
func (r *Reconciler) findResult(ctx context.Context, profile *semmoev1.AffinityProfile, id string) (*semmoev1.ProfileResult, error) {
	store, err := r.Store.Client(ctx)
	if err != nil {
		return nil, err
	}
	scope := artifact.Scope{Namespace: profile.Namespace, Kind: artifact.Profile, ID: id}
	digest, err := store.Published(ctx, scope)
	if errors.Is(err, artifact.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if known := profile.Status.Result; known != nil && known.Digest == string(digest) {
		return known, nil // the content of a digest never changes
	}
	manifest, err := recording.FetchManifest(ctx, store, scope, digest)
	if err != nil {
		return nil, err
	}
	return resultOf(digest, manifest), nil
}

func resultOf(digest artifact.Digest, m recording.Manifest) *semmoev1.ProfileResult {
	s := m.Summary
	return &semmoev1.ProfileResult{
		Digest: string(digest), Requests: int32(s.Requests), Refused: int32(s.Refused), Tokens: int64(s.Tokens), TracedTokens: int64(s.TracedTokens),
		DistinctTokens: int32(s.DistinctTokens), CoverageMilli: int32(s.CoverageMilli), SkewMilli: int32(s.SkewMilli),
		NoEmbeddings: printable.Line(m.NoEmbeddings, recording.MaxNoEmbeddings),
	}
}

// storeAdvice returns the message for a store that cannot be queried.
func storeAdvice(err error) string {
	if errors.Is(err, access.ErrNoStore) {
		return "Profiles cannot be stored: " + err.Error()
	}
	return printable.Line(fmt.Sprintf("The artifact store is unavailable and is retried: %v. Check the pods of semmoe-store", err), 1024)
}

// observeProgress requests the progress of the running Job, unless the status was written recently. It returns nil
// while the Job sends no requests.
func (r *Reconciler) observeProgress(ctx context.Context, profile *semmoev1.AffinityProfile, pods []*corev1.Pod, now time.Time) *semmoev1.ProfileProgress {
	known := profile.Status.Progress
	if known != nil && now.Sub(statusWritten(profile)) < progressPeriod {
		return known
	}
	for _, pod := range pods {
		if pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil || pod.Status.PodIP == "" {
			continue
		}
		var report recording.ProgressReport
		if err := lookup.Progress(ctx, r.HTTP, pod.Status.PodIP, progressPort(profile), recording.ProgressPath, &report); err != nil {
			logr.FromContextOrDiscard(ctx).V(1).Info("Failed to query the progress of a profiling pod", "pod", pod.Name, "reason", err.Error())
			return known
		}
		return progressOf(report)
	}
	return nil
}

// statusWritten returns the time of this controller's last write of the status.
func statusWritten(profile *semmoev1.AffinityProfile) time.Time {
	for _, entry := range profile.ManagedFields {
		if entry.Manager == manager && entry.Subresource == "status" && entry.Time != nil {
			return entry.Time.Time
		}
	}
	return time.Time{}
}

func progressOf(report recording.ProgressReport) *semmoev1.ProfileProgress {
	if report.RequestsDone == 0 {
		return nil
	}
	return &semmoev1.ProfileProgress{
		RequestsDone: int32(report.RequestsDone), RequestsTotal: int32(report.RequestsTotal),
		TokensPerSecond: int32(report.TokensPerSecond), RemainingSeconds: int32(report.RemainingSeconds),
		Summary: fmt.Sprintf("%d/%d", report.RequestsDone, report.RequestsTotal),
	}
}
