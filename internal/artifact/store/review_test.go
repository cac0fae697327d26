package store

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/semmoe/operator/internal/artifact"
)

// Answers that this release's API server does not give, but that another authenticator behind it may. TestTokens has the
// real one.
func TestReviewAnswers(t *testing.T) {
	pod := profilePod("p")
	pod.UID = "uid-1"
	user := func(name, podName, podUID string) authenticationv1.UserInfo {
		return authenticationv1.UserInfo{Username: name, Extra: map[string]authenticationv1.ExtraValue{podNameKey: {podName}, podUIDKey: {podUID}}}
	}
	ours := []string{artifact.Audience}
	cases := map[string]struct {
		status authenticationv1.TokenReviewStatus
		want   string // part of the refusal; empty: accepted
	}{
		"good":                          {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: ours, User: user("system:serviceaccount:team-a:default", "p", "uid-1")}, ""},
		"manager":                       {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: ours, User: authenticationv1.UserInfo{Username: "system:serviceaccount:s:m"}}, ""},
		"not authenticated":             {authenticationv1.TokenReviewStatus{Audiences: ours, User: user("system:serviceaccount:team-a:default", "p", "uid-1")}, "not valid"},
		"no audiences confirmed":        {authenticationv1.TokenReviewStatus{Authenticated: true, User: user("system:serviceaccount:team-a:default", "p", "uid-1")}, "not for " + artifact.Audience},
		"others confirmed":              {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: []string{"x"}, User: user("system:serviceaccount:s:m", "p", "uid-1")}, "not for " + artifact.Audience},
		"pod made again":                {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: ours, User: user("system:serviceaccount:team-a:default", "p", "uid-0")}, "is gone"},
		"pod of another namespace":      {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: ours, User: user("system:serviceaccount:team-b:default", "p", "uid-1")}, "is gone"},
		"person":                        {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: ours, User: user("team-a:default", "p", "uid-1")}, "not bound to a pod"},
		"pod without a UID":             {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: ours, User: user("system:serviceaccount:team-a:default", "p", "")}, "not bound to a pod"},
		"manager's name as a namespace": {authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: ours, User: authenticationv1.UserInfo{Username: "s:m"}}, "not bound to a pod"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			clients := fake.NewClientset(pod)
			reviews := 0
			clients.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
				reviews++
				return true, &authenticationv1.TokenReview{ObjectMeta: metav1.ObjectMeta{}, Status: tc.status}, nil
			})
			r := newReviewer(clients, types.NamespacedName{Namespace: "s", Name: "m"}, newMetrics(prometheus.NewRegistry()))
			for range 2 {
				who, err := r.identify(t.Context(), jwt(time.Now().Add(time.Hour)))
				if tc.want == "" && err != nil || tc.want != "" && (code(err) != http.StatusUnauthorized || !strings.Contains(err.Error(), tc.want)) {
					t.Errorf("error %v, want one with %q", err, tc.want)
				}
				if err != nil && (who.manager || who.pod != nil) {
					t.Errorf("refused, but known as %+v", who)
				}
			}
			if reviews != 1 {
				t.Errorf("the API server was asked %d times", reviews)
			}
		})
	}
}

// What is remembered of a token ends with it.
func TestExpiry(t *testing.T) {
	at := time.Unix(1_900_000_000, 0)
	cases := map[string]struct {
		token string
		want  time.Time
	}{
		"token":          {jwt(at), at},
		"no expiry":      {"e30.e30.e30", time.Unix(0, 0)},
		"two parts":      {"e30.e30", time.Time{}},
		"not base64":     {"e30.*.e30", time.Time{}},
		"not JSON":       {"e30.eHg.e30", time.Time{}},
		"expiry as text": {"e30." + base64.RawURLEncoding.EncodeToString([]byte(`{"exp":"x"}`)) + ".e30", time.Time{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := expiry(tc.token); !got.Equal(tc.want) {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
	clients := fake.NewClientset()
	reviews := 0
	clients.PrependReactor("create", "tokenreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		reviews++
		return true, &authenticationv1.TokenReview{Status: authenticationv1.TokenReviewStatus{
			Authenticated: true, Audiences: []string{artifact.Audience}, User: authenticationv1.UserInfo{Username: "system:serviceaccount:s:m"},
		}}, nil
	})
	r := newReviewer(clients, types.NamespacedName{Namespace: "s", Name: "m"}, newMetrics(prometheus.NewRegistry()))
	for range 3 {
		if _, err := r.identify(t.Context(), jwt(time.Now().Add(-time.Second))); err != nil {
			t.Error(err)
		}
	}
	if reviews != 3 {
		t.Errorf("a token past its end was remembered: %d reviews of 3", reviews)
	}
}

func jwt(expiry time.Time) string {
	return "e30." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d}`, expiry.Unix())) + ".e30"
}
