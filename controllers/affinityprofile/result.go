package affinityprofile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/printable"
	recording "github.com/semmoe/operator/internal/profile"
)

// progressTimeout bounds a question for the progress, so that a pod that hangs does not hold up the reconciliation.
const progressTimeout = 2 * time.Second

// maxProgressReport bounds the answer to that question, in bytes.
const maxProgressReport = 64 << 10

// findResult asks the store for the profile of these inputs; nil where it has none.
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
		return known, nil // what a digest names never changes
	}
	manifest, err := recording.FetchManifest(ctx, store, scope, digest)
	if err != nil {
		return nil, err
	}
	return resultOf(digest, manifest.Summary), nil
}

func resultOf(digest artifact.Digest, s recording.Summary) *semmoev1.ProfileResult {
	return &semmoev1.ProfileResult{
		Digest: string(digest), Requests: int32(s.Requests), Refused: int32(s.Refused), Tokens: int64(s.Tokens), TracedTokens: int64(s.TracedTokens),
		DistinctTokens: int32(s.DistinctTokens), CoverageMilli: int32(s.CoverageMilli), SkewMilli: int32(s.SkewMilli),
	}
}

// storeAdvice says what to do about a store that cannot be asked.
func storeAdvice(err error) string {
	if errors.Is(err, access.ErrNoStore) {
		return "No profile can be kept: " + err.Error()
	}
	return printable.Line(fmt.Sprintf("The artifact store does not answer, and is asked again: %v: see the pods of semmoe-store", err), 1024)
}

// observeProgress asks the Job at work how far it is, unless the status has just been written; nil while it does not send
// requests.
func (r *Reconciler) observeProgress(ctx context.Context, profile *semmoev1.AffinityProfile, pods []*corev1.Pod, now time.Time) *semmoev1.ProfileProgress {
	known := profile.Status.Progress
	if known != nil && now.Sub(statusWritten(profile)) < progressPeriod {
		return known
	}
	for _, pod := range pods {
		if pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil || pod.Status.PodIP == "" {
			continue
		}
		report, err := r.fetchProgress(ctx, pod.Status.PodIP, progressPort(profile))
		if err != nil {
			logr.FromContextOrDiscard(ctx).V(1).Info("A profiling pod does not tell its progress", "pod", pod.Name, "reason", err.Error())
			return known
		}
		return progressOf(report)
	}
	return nil
}

// statusWritten is when this controller last changed the status.
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

func (r *Reconciler) fetchProgress(ctx context.Context, podIP string, port int32) (recording.ProgressReport, error) {
	ctx, cancel := context.WithTimeout(ctx, progressTimeout)
	defer cancel()
	var report recording.ProgressReport
	url := fmt.Sprintf("http://%s%s", net.JoinHostPort(podIP, fmt.Sprint(port)), recording.ProgressPath)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return report, err
	}
	response, err := r.HTTP.Do(request)
	if err != nil {
		return report, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return report, errors.New(response.Status)
	}
	return report, json.NewDecoder(io.LimitReader(response.Body, maxProgressReport)).Decode(&report)
}
