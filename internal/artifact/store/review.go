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
	// knownFor bounds how long a pod that is gone, or relabelled, keeps its access.
	knownFor = time.Minute
	// refusedFor spares the API server the questions of a caller that insists.
	refusedFor = 10 * time.Second
	// cacheSize bounds the tokens that are remembered; each has a pod of a few kilobytes.
	cacheSize = 2048
	// maxToken is above any token that an API server issues.
	maxToken = 16 << 10
	// reviewTimeout bounds how long a request waits for the API server.
	reviewTimeout = 10 * time.Second
	// strangeRate and strangeBurst bound the tokens that were never confirmed, of one address, that the API server is asked about:
	// they are a fraction of what the store may ask it, so that nobody who makes up tokens keeps others waiting. strangeFor is how long
	// an address is remembered for that.
	strangeRate  = 10
	strangeBurst = 50
	strangeFor   = time.Minute
)

const (
	podNameKey        = "authentication.kubernetes.io/pod-name"
	podUIDKey         = "authentication.kubernetes.io/pod-uid"
	serviceAccountTag = "system:serviceaccount:"
)

// caller is who sent a request: the manager, or a pod.
type caller struct {
	manager bool
	pod     *corev1.Pod
}

// name is for logs.
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

// reviewer finds out from the API server who a token belongs to.
type reviewer struct {
	clients kubernetes.Interface
	manager string // user name
	metrics *metrics
	known   *cache.LRUExpireCache // sha256 of the token -> verdict
	// confirmed holds the sha256 of tokens that were accepted, until they end; strangers a rate limiter by address.
	confirmed, strangers *cache.LRUExpireCache
	flights              singleflight.Group
}

// verdict is a caller, or why there is none.
type verdict struct {
	caller  caller
	refusal error
}

func newReviewer(clients kubernetes.Interface, manager types.NamespacedName, m *metrics) *reviewer {
	return &reviewer{
		clients: clients,
		manager: serviceAccountTag + manager.Namespace + ":" + manager.Name,
		metrics: m,
		known:   cache.NewLRUExpireCache(cacheSize), confirmed: cache.NewLRUExpireCache(cacheSize), strangers: cache.NewLRUExpireCache(cacheSize),
	}
}

// identify returns the caller that a token belongs to, which an address has sent. The error is a refusal (401), or says that the API
// server is not asked about so many tokens of the address (429), or cannot be asked (503).
func (r *reviewer) identify(ctx context.Context, address, token string) (caller, error) {
	if token == "" || len(token) > maxToken {
		return caller{}, fail(http.StatusUnauthorized, "a bearer token of a service account is required")
	}
	key := sha256.Sum256([]byte(token))
	if v, ok := r.known.Get(key); ok {
		return v.(verdict).caller, v.(verdict).refusal
	}
	if err := plausible(token, time.Now()); err != nil {
		return caller{}, err
	}
	// One question for all the requests that a client sends at once, which outlives the one that came first.
	v, err, _ := r.flights.Do(string(key[:]), func() (any, error) {
		if _, confirmed := r.confirmed.Get(key); !confirmed && !r.admits(address) {
			return nil, fail(http.StatusTooManyRequests, "more than %d new tokens a second come from this address", strangeRate)
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
			return nil, because(fail(http.StatusServiceUnavailable, "the token cannot be checked now"), err)
		}
		return verdict{c, err}, nil
	})
	if err != nil {
		return caller{}, err
	}
	return v.(verdict).caller, v.(verdict).refusal
}

// admits reports whether the API server may be asked about one more new token of an address.
func (r *reviewer) admits(address string) bool {
	limiter, ok := r.strangers.Get(address)
	if !ok {
		limiter = flowcontrol.NewTokenBucketRateLimiter(strangeRate, strangeBurst)
	}
	r.strangers.Add(address, limiter, strangeFor)
	return limiter.(flowcontrol.RateLimiter).TryAccept()
}

// review asks the API server. An error that is no StatusError means that it did not answer.
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
		return caller{}, because(fail(http.StatusUnauthorized, "the token is not valid for audience %s", artifact.Audience), errors.New(status.Error))
	case !slices.Contains(status.Audiences, artifact.Audience):
		// An authenticator that knows no audiences would let any token pass.
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
	// What the policy looks at; the rest of a pod can be large.
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

// claims are what a token says of itself.
type claims struct {
	Audience audiences `json:"aud"`
	Expiry   int64     `json:"exp"`
}

// audiences are one, as a text, or several.
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

// plausible refuses what the API server need not be asked about: a token that does not even say that it is for the store, and has
// time left.
func plausible(token string, now time.Time) error {
	c, ok := claimsOf(token)
	switch {
	case !ok:
		return fail(http.StatusUnauthorized, "the token is not valid for audience %s: it is no token of a service account", artifact.Audience)
	case !slices.Contains(c.Audience, artifact.Audience):
		return fail(http.StatusUnauthorized, "the token is not valid for audience %s: it is for the audiences %q", artifact.Audience, []string(c.Audience))
	case !time.Unix(c.Expiry, 0).After(now):
		return fail(http.StatusUnauthorized, "the token is not valid for audience %s: it has ended at %s", artifact.Audience, time.Unix(c.Expiry, 0).UTC().Format(time.RFC3339))
	}
	return nil
}

// expiry is when a token that the API server has confirmed ends.
func expiry(token string) time.Time {
	c, _ := claimsOf(token)
	return time.Unix(c.Expiry, 0)
}

// because adds a cause to the error of an answer. The cause is logged, and not sent: it can name addresses and other objects of the
// cluster.
func because(answer, cause error) error { return fmt.Errorf("%w (%w)", answer, cause) }

// fail makes the error of an answer.
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
