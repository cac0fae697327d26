// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/semmoe/operator/internal/artifact"
)

const (
	// knownFor limits the time that a deleted or relabeled pod keeps its access.
	knownFor = time.Minute
	// refusedFor is the time that a rejection is cached, to limit the reviews for a caller that retries.
	refusedFor = 10 * time.Second
	// cacheSize is the maximum number of cached tokens. Each has a pod of a few kilobytes.
	cacheSize = 2048
	// maxToken is the maximum length of a token. API servers issue shorter tokens.
	maxToken = 16 << 10
	// reviewTimeout limits the time that a request waits for the API server.
	reviewTimeout = 10 * time.Second
	// newTokenRate and newTokenBurst limit the reviews of unconfirmed tokens per address. The limits are a fraction of
	// the store's rate limit for the API server, so that a client with made-up tokens does not delay other clients.
	// limiterLifetime is the time after which an address is forgotten.
	newTokenRate    = 10
	newTokenBurst   = 50
	limiterLifetime = time.Minute
)

const (
	podNameKey        = "authentication.kubernetes.io/pod-name"
	podUIDKey         = "authentication.kubernetes.io/pod-uid"
	serviceAccountTag = "system:serviceaccount:"
)

// caller is the sender of a request: the manager or a pod.
type caller struct {
	manager bool
	pod     *corev1.Pod
}

// name returns the name of the caller for logs.
func (c caller) name() string {
	if c.manager {
		return "manager"
	}
	return c.pod.Namespace + "/" + c.pod.Name
}

func (c caller) authorize(verb Verb, scope artifact.Scope) error {
	if c.manager {
		return nil
	}
	return Authorize(c.pod, verb, scope)
}

// reviewer authenticates tokens with the API server (TokenReview).
type reviewer struct {
	clients kubernetes.Interface
	manager string // user name
	metrics *metrics
	known   *cache.LRUExpireCache // sha256 of the token -> verdict
	// confirmed contains the SHA-256 digests of accepted tokens until they expire. limiters contains a rate limiter
	// per address.
	confirmed, limiters *cache.LRUExpireCache
	flights             singleflight.Group
}

// verdict is a caller or an error.
type verdict struct {
	caller  caller
	refusal error
}

func newReviewer(clients kubernetes.Interface, manager types.NamespacedName, m *metrics) *reviewer {
	return &reviewer{
		clients: clients,
		manager: serviceAccountTag + manager.Namespace + ":" + manager.Name,
		metrics: m,
		known:   cache.NewLRUExpireCache(cacheSize), confirmed: cache.NewLRUExpireCache(cacheSize), limiters: cache.NewLRUExpireCache(cacheSize),
	}
}

// identify returns the caller of a token that an address has sent. The error has status 401 for an invalid token, 429
// if the address has sent too many new tokens, and 503 if the API server does not respond.
func (r *reviewer) identify(ctx context.Context, address, token string) (caller, error) {
	if token == "" || len(token) > maxToken {
		return caller{}, fail(http.StatusUnauthorized, "a service account token is required as bearer token")
	}
	key := sha256.Sum256([]byte(token))
	if v, ok := r.known.Get(key); ok {
		return v.(verdict).caller, v.(verdict).refusal
	}
	if err := plausible(token, time.Now()); err != nil {
		return caller{}, err
	}
	// Concurrent requests with the same token share one review, which is independent of the context of the first
	// request.
	v, err, _ := r.flights.Do(string(key[:]), func() (any, error) {
		if _, confirmed := r.confirmed.Get(key); !confirmed && !r.admits(address) {
			return nil, fail(http.StatusTooManyRequests, "this address has sent more than %d new tokens per second", newTokenRate)
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
		defer cancel()
		c, err := r.review(ctx, token)
		r.metrics.reviews.WithLabelValues(reviewResult(err)).Inc()
		var refusal *artifact.StatusError
		switch {
		case err == nil:
			left := time.Until(expiry(token))
			r.known.Add(key, verdict{caller: c}, min(knownFor, left))
			r.confirmed.Add(key, nil, left)
		case errors.As(err, &refusal):
			r.known.Add(key, verdict{refusal: err}, refusedFor)
		default:
			return nil, withCause(fail(http.StatusServiceUnavailable, "the token cannot be verified at the moment"), err)
		}
		return verdict{c, err}, nil
	})
	if err != nil {
		return caller{}, err
	}
	return v.(verdict).caller, v.(verdict).refusal
}

// admits reports whether the rate limit of an address allows another token review.
func (r *reviewer) admits(address string) bool {
	limiter, ok := r.limiters.Get(address)
	if !ok {
		limiter = flowcontrol.NewTokenBucketRateLimiter(newTokenRate, newTokenBurst)
	}
	r.limiters.Add(address, limiter, limiterLifetime)
	return limiter.(flowcontrol.RateLimiter).TryAccept()
}

// review sends a TokenReview to the API server. An error that is not a StatusError means that the API server did not
// respond.
func (r *reviewer) review(ctx context.Context, token string) (caller, error) {
	review, err := r.clients.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{artifact.Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return caller{}, err
	}
	status := review.Status
	switch {
	case !status.Authenticated:
		return caller{}, withCause(fail(http.StatusUnauthorized, "the token is not valid for audience %s", artifact.Audience), errors.New(status.Error))
	case !slices.Contains(status.Audiences, artifact.Audience):
		// An authenticator without support for audiences would accept any token.
		return caller{}, fail(http.StatusUnauthorized, "the token is for the audiences %q, not for %s", status.Audiences, artifact.Audience)
	case status.User.Username == r.manager:
		return caller{manager: true}, nil
	}
	namespace, _, isServiceAccount := strings.Cut(strings.TrimPrefix(status.User.Username, serviceAccountTag), ":")
	name, uid := first(status.User.Extra[podNameKey]), first(status.User.Extra[podUIDKey])
	if !isServiceAccount || !strings.HasPrefix(status.User.Username, serviceAccountTag) || name == "" || uid == "" {
		return caller{}, fail(http.StatusUnauthorized, "the token of %s is not bound to a pod", status.User.Username)
	}
	pod, err := r.clients.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), err == nil && string(pod.UID) != uid:
		return caller{}, fail(http.StatusUnauthorized, "pod %s/%s, which the token is bound to, is gone", namespace, name)
	case err != nil:
		return caller{}, err
	}
	// Only the fields that the policy needs are kept, because a pod can be large.
	return caller{pod: &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
			Labels: pod.Labels, Annotations: pod.Annotations, OwnerReferences: pod.OwnerReferences,
		},
		Status: corev1.PodStatus{Phase: pod.Status.Phase},
	}}, nil
}

func first(values authenticationv1.ExtraValue) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// claims are the unverified claims of a token.
type claims struct {
	Audience audiences `json:"aud"`
	Expiry   int64     `json:"exp"`
}

// audiences is encoded as a string or as a list of strings.
type audiences []string

func (a *audiences) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		*a = audiences{""}
		return json.Unmarshal(data, &(*a)[0])
	}
	return json.Unmarshal(data, (*[]string)(a))
}

func claimsOf(token string) (c claims, ok bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return claims{}, false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil || json.Unmarshal(payload, &c) != nil {
		return claims{}, false
	}
	return c, true
}

// plausible rejects tokens that need no review by the API server: tokens that are malformed, have a different audience,
// or have expired.
func plausible(token string, now time.Time) error {
	c, ok := claimsOf(token)
	switch {
	case !ok:
		return fail(http.StatusUnauthorized, "the token is not valid for audience %s: it is not a service account token", artifact.Audience)
	case !slices.Contains(c.Audience, artifact.Audience):
		return fail(http.StatusUnauthorized, "the token is not valid for audience %s: it is for the audiences %q", artifact.Audience, []string(c.Audience))
	case !time.Unix(c.Expiry, 0).After(now):
		return fail(http.StatusUnauthorized, "the token is not valid for audience %s: it expired at %s", artifact.Audience, time.Unix(c.Expiry, 0).UTC().Format(time.RFC3339))
	}
	return nil
}

// expiry returns the expiration time of a confirmed token.
func expiry(token string) time.Time {
	c, _ := claimsOf(token)
	return time.Unix(c.Expiry, 0)
}

// withCause adds a cause to the error of a response. The cause is logged but not sent, because it can contain addresses
// and names of cluster objects.
func withCause(answer, cause error) error { return fmt.Errorf("%w (%w)", answer, cause) }

// fail returns the error of a response.
func fail(code int, format string, args ...any) error {
	return &artifact.StatusError{Code: code, Message: strings.TrimRight(fmt.Sprintf(format, args...), ": ")}
}

func reviewResult(err error) string {
	var refusal *artifact.StatusError
	switch {
	case err == nil:
		return reviewAccepted
	case errors.As(err, &refusal):
		return reviewRefused
	}
	return reviewError
}
