// SPDX-License-Identifier: Apache-2.0

package affinityprofile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/kube/result"
	recording "github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// samplesPeriod is the interval at which routers are queried for the number of their samples.
	samplesPeriod = 15 * time.Second
	// sizesTimeout and samplesTimeout bound a request to one router: for the number of its samples, and for the
	// samples.
	sizesTimeout   = 2 * time.Second
	samplesTimeout = 20 * time.Second
	// enoughTokens and enoughRequests are the required numbers of samples, unless the sampling sets smaller numbers.
	// New tables from 25,000 tokens recover nearly half of the loss from a drift, and a part of the requests is held
	// out to evaluate a plan.
	enoughTokens   = 25000
	enoughRequests = 100
	// maxSampleBytes bounds the uncompressed samples of one router. A router keeps about 32 MB of expert IDs and 8 MB
	// per million tokens, or counts of 72 MB.
	maxSampleBytes = 192 << 20
	// liveSeed is the seed of the random sample, so that the same samples give the same profile.
	liveSeed = 1
)

// liveState is the state of the samples that a live profile waits for.
type liveState struct {
	// Routers is the number of request routers that returned their numbers of samples.
	Routers int
	// Requests and Tokens are the numbers of samples of all routers. WantRequests and WantTokens are the required
	// numbers. Counts contain no requests.
	Requests, Tokens, WantRequests, WantTokens int64
	// None is true if no router keeps samples of the requested kind.
	None bool
}

func (l *liveState) enough() bool {
	return l.Tokens >= l.WantTokens && l.Requests >= l.WantRequests
}

// progress returns the progress in tokens, and in requests once there are enough tokens.
func (l *liveState) progress() *semmoev1.ProfileProgress {
	done, total := l.Tokens, l.WantTokens
	if l.Tokens >= l.WantTokens {
		done, total = l.Requests, l.WantRequests
	}
	if done == 0 || total == 0 {
		return nil
	}
	return &semmoev1.ProfileProgress{RequestsDone: int32(done), RequestsTotal: int32(total), Summary: fmt.Sprintf("%d/%d", done, total)}
}

// wantedSamples returns the required numbers of samples.
func wantedSamples(profile *semmoev1.AffinityProfile) liveState {
	l := liveState{WantTokens: min(int64(profile.Spec.Tokens), enoughTokens)}
	if profile.Spec.Live.Samples == semmoev1.LiveSamplesSequences {
		l.WantRequests = min(int64(profile.Spec.Requests), enoughRequests)
	}
	return l
}

// samplesSince returns the start of the period from which samples are used.
func samplesSince(profile *semmoev1.AffinityProfile) time.Time {
	if since := profile.Spec.Live.Since; since != nil {
		return since.Time
	}
	return profile.CreationTimestamp.Time
}

// reconcileLive makes a profile from the samples of routers. It needs no Job. The store has the complete result or
// none: a reconciliation that is interrupted starts again.
func (r *Reconciler) reconcileLive(ctx context.Context, profile *semmoev1.AffinityProfile) (ctrl.Result, error) {
	o := observation{Invalid: validate(profile), ID: recording.LiveID(string(profile.UID))}
	var after time.Duration
	var err error
	if o.Invalid == nil {
		after, err = r.makeLive(ctx, profile, &o)
	}
	o.Failure = result.PermanentErrorText(err)
	err = errors.Join(err, r.applyStatus(ctx, profile, statusOf(profile, o, r.Now())))
	return ctrl.Result{RequeueAfter: after}, err
}

// makeLive completes the observation, and publishes the profile once the routers have enough samples. It returns the
// delay of the next reconciliation.
func (r *Reconciler) makeLive(ctx context.Context, profile *semmoev1.AffinityProfile, o *observation) (time.Duration, error) {
	store, err := r.Store.Client(ctx)
	if err == nil {
		err = r.findLive(ctx, store, profile, o)
	}
	if err != nil {
		o.StoreFailure = storeAdvice(err)
		if profile.Status.Inputs == o.ID {
			o.Result, o.Model = profile.Status.Result, profile.Status.Model
		}
		return storePeriod, nil
	}
	if o.Result != nil {
		return 0, nil
	}
	prior, err := r.liveInputs(ctx, profile, o)
	if err != nil || o.LiveWaits != "" {
		return samplesPeriod, err
	}
	routers, err := r.routersOf(ctx, profile)
	if err != nil {
		return 0, err
	}
	state := wantedSamples(profile)
	r.countSamples(ctx, profile, routers, &state)
	o.Live, o.Progress = &state, state.progress()
	// The samples of several profiles at once could exceed the memory.
	if !state.enough() || !r.collecting.TryLock() {
		return samplesPeriod, nil
	}
	defer r.collecting.Unlock()
	if err := r.publishLive(ctx, store, profile, prior, routers); err != nil {
		logr.FromContextOrDiscard(ctx).Info("Failed to make a live profile; retrying", "profile", profile.Name, "reason", err.Error())
		o.LiveFailure = printable.Line(err.Error(), 512)
		return samplesPeriod, nil
	}
	return 0, r.findLive(ctx, store, profile, o)
}

// findLive reads the result from the store.
func (r *Reconciler) findLive(ctx context.Context, store *access.Client, profile *semmoev1.AffinityProfile, o *observation) error {
	scope := artifact.Scope{Namespace: profile.Namespace, Kind: artifact.Profile, ID: o.ID}
	digest, err := store.Published(ctx, scope)
	if errors.Is(err, artifact.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if known := profile.Status.Result; known != nil && known.Digest == string(digest) && profile.Status.Model != nil {
		o.Result, o.Model = known, profile.Status.Model // the content of a digest never changes
		return nil
	}
	manifest, err := recording.FetchManifest(ctx, store, scope, digest)
	if err != nil {
		return err
	}
	if manifest.Live == nil {
		return fmt.Errorf("the result of %s is not a live profile", scope)
	}
	m := manifest.Live.Model
	o.Result = resultOf(digest, manifest)
	o.Model = &semmoev1.ModelStatus{
		Digest: manifest.ModelDigest, Family: m.Type, Layers: int32(m.HiddenLayers), MoELayers: int32(len(m.Layers)),
		Experts: int32(m.Experts), ExpertsPerToken: int32(m.TopK),
	}
	return nil
}

// liveInputs reads the prior profile. It sets LiveWaits if an input is missing.
func (r *Reconciler) liveInputs(ctx context.Context, profile *semmoev1.AffinityProfile, o *observation) (*semmoev1.AffinityProfile, error) {
	name := profile.Spec.Live.PriorProfileRef.Name
	prior := &semmoev1.AffinityProfile{}
	err := r.Get(ctx, client.ObjectKey{Namespace: profile.Namespace, Name: name}, prior)
	switch {
	case apierrors.IsNotFound(err):
		o.LiveWaits = fmt.Sprintf("spec.live.priorProfileRef: AffinityProfile %q does not exist in this namespace", name)
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("failed to get AffinityProfile %s: %w", name, err)
	case !meta.IsStatusConditionTrue(prior.Status.Conditions, semmoev1.ConditionReady) || prior.Status.Result == nil || prior.Status.Model == nil:
		o.LiveWaits = fmt.Sprintf("AffinityProfile %s (spec.live.priorProfileRef) is not complete", name)
		return nil, nil
	}
	moed := &semmoev1.MoEDeployment{}
	deployment := profile.Spec.DeploymentRef.Name
	err = r.Get(ctx, client.ObjectKey{Namespace: profile.Namespace, Name: deployment}, moed)
	switch {
	case apierrors.IsNotFound(err):
		o.LiveWaits = fmt.Sprintf("spec.deploymentRef: MoEDeployment %q does not exist in this namespace", deployment)
	case err != nil:
		return nil, fmt.Errorf("failed to get MoEDeployment %s: %w", deployment, err)
	case moed.Spec.Reconciliation == semmoev1.ReconciliationPaused:
		o.LiveWaits = fmt.Sprintf("MoEDeployment %s is paused (spec.reconciliation)", deployment)
	}
	return prior, nil
}

// routersOf returns the ready request routers of the profile's deployment, sorted by name.
func (r *Reconciler) routersOf(ctx context.Context, profile *semmoev1.AffinityProfile) ([]*corev1.Pod, error) {
	_, pods, err := r.list(ctx, profile.Namespace, client.MatchingLabels{
		semmoev1.LabelDeployment: profile.Spec.DeploymentRef.Name, semmoev1.LabelComponent: semmoev1.ComponentRouter,
	})
	pods = slices.DeleteFunc(pods, func(pod *corev1.Pod) bool { return !podhealth.Ready(pod) || pod.Status.PodIP == "" })
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return pods, err
}

// countSamples sums the numbers of samples of the routers. Unreachable routers are skipped, and queried again in the
// next reconciliation.
func (r *Reconciler) countSamples(ctx context.Context, profile *semmoev1.AffinityProfile, routers []*corev1.Pod, state *liveState) {
	log := logr.FromContextOrDiscard(ctx)
	none := 0
	for _, pod := range routers {
		response, err := r.requestSamples(ctx, http.MethodHead, profile, pod, sizesTimeout)
		if err != nil {
			log.V(1).Info("Failed to query the number of samples of a request router", "pod", pod.Name, "reason", err.Error())
			continue
		}
		response.Body.Close()
		switch response.StatusCode {
		case http.StatusOK:
			state.Routers++
			state.Tokens += headerNumber(response, livesamples.HeaderTokens)
			state.Requests += headerNumber(response, livesamples.HeaderRequests)
		case http.StatusNotFound:
			none++
		}
	}
	state.None = none > 0 && state.Routers == 0
}

func headerNumber(response *http.Response, name string) int64 {
	n, err := strconv.ParseInt(response.Header.Get(name), 10, 64)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// requestSamples requests the samples of a profile from a router. The timeout applies until the caller closes the body.
func (r *Reconciler) requestSamples(ctx context.Context, method string, profile *semmoev1.AffinityProfile, pod *corev1.Pod, timeout time.Duration) (*http.Response, error) {
	path := livesamples.CountsPath
	if profile.Spec.Live.Samples == semmoev1.LiveSamplesSequences {
		path = livesamples.SequencesPath
	}
	address := url.URL{
		Scheme: "https", Host: net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(managerauth.Port)), Path: path,
		RawQuery: url.Values{livesamples.QuerySince: {samplesSince(profile).UTC().Format(time.RFC3339)}}.Encode(),
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	request, err := http.NewRequestWithContext(ctx, method, address.String(), nil)
	if err != nil {
		cancel()
		return nil, err
	}
	response, err := r.Routers.HTTP.Do(request)
	if err != nil {
		cancel()
		return nil, err
	}
	response.Body = &cancelledBody{response.Body, cancel}
	return response, nil
}

// cancelledBody cancels the context of its request when it is closed.
type cancelledBody struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (b *cancelledBody) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}

// publishLive makes the profile from the current samples of the routers, and publishes it.
func (r *Reconciler) publishLive(ctx context.Context, store *access.Client, profile, prior *semmoev1.AffinityProfile, routers []*corev1.Pod) error {
	from := artifact.Scope{Namespace: prior.Namespace, Kind: artifact.Profile, ID: prior.Status.Inputs}
	manifest, err := recording.FetchManifest(ctx, store, from, artifact.Digest(prior.Status.Result.Digest))
	if err != nil {
		return fmt.Errorf("failed to read AffinityProfile %s: %w", prior.Name, err)
	}
	model, err := recording.FetchModel(ctx, store, from, manifest)
	if err != nil {
		return fmt.Errorf("failed to read AffinityProfile %s: %w", prior.Name, err)
	}
	carried := map[string][]byte{}
	for name, limit := range recording.CheckpointFiles {
		if digest, has := manifest.Files[name]; has {
			if carried[name], err = store.ReadAll(ctx, from, digest, limit); err != nil {
				return fmt.Errorf("failed to read %s of AffinityProfile %s: %w", name, prior.Name, err)
			}
		}
	}
	made, err := r.collect(ctx, profile, routers, model, manifest.ModelDigest)
	if err != nil {
		return err
	}
	_, err = recording.PublishLive(ctx, store, artifact.Scope{Namespace: profile.Namespace, Kind: artifact.Profile, ID: recording.LiveID(string(profile.UID))}, made, recording.Manifest{
		ModelDigest: manifest.ModelDigest, Sampling: samplingOf(profile), NoEmbeddings: manifest.NoEmbeddings,
		Live: &recording.Live{UID: string(profile.UID), Samples: string(profile.Spec.Live.Samples), Model: model},
	}, carried)
	return err
}

// collect makes a profile from the samples of the routers. It fails if the samples of one router cannot be read,
// because a part of the traffic would be missing.
func (r *Reconciler) collect(ctx context.Context, profile *semmoev1.AffinityProfile, routers []*corev1.Pod, model recording.Model, digest string) (*recording.Profile, error) {
	var sequences []*trace.Trace
	var counted []*counts.Counts
	for _, pod := range routers {
		err := r.readSamples(ctx, profile, pod, func(body io.Reader) (err error) {
			if profile.Spec.Live.Samples == semmoev1.LiveSamplesSequences {
				var part *trace.Trace
				part, err = trace.Read(body, maxSampleBytes)
				sequences = append(sequences, part)
				return err
			}
			var part *counts.Counts
			part, err = counts.ReadCompressed(body, maxSampleBytes)
			counted = append(counted, part)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("failed to read the samples of request router %s: %w", pod.Name, err)
		}
	}
	if profile.Spec.Live.Samples == semmoev1.LiveSamplesSequences {
		return recording.FromSequences(sequences, model, digest, samplingOf(profile), liveSeed)
	}
	return recording.FromCounts(counted, model, digest)
}

// readSamples calls read with the samples of a router. A router without samples is skipped.
func (r *Reconciler) readSamples(ctx context.Context, profile *semmoev1.AffinityProfile, pod *corev1.Pod, read func(io.Reader) error) error {
	response, err := r.requestSamples(ctx, http.MethodGet, profile, pod, samplesTimeout)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
		return read(response.Body)
	case http.StatusNoContent, http.StatusNotFound:
		return nil
	}
	return errors.New(response.Status)
}
