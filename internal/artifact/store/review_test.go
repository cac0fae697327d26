// SPDX-License-Identifier: Apache-2.0

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

// Token reviews that the API server of the test does not return, but that other authenticators may return. TestTokens
// uses the real API server.
func TestReviewAnswers(t *testing.T) {
	pod := profilePod("p")
	pod.UID = "uid-1"
	user := func(name, podName, podUID string) authenticationv1.UserInfo {
		return authenticationv1.UserInfo{Username: name, Extra: map[string]authenticationv1.ExtraValue{podNameKey: {podName}, podUIDKey: {podUID}}}
	}
	ours := []string{artifact.Audience}
	cases := map[string]struct {
		status authenticationv1.TokenReviewStatus
		want   string // part of the error; empty: accepted
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
				who, err := r.identify(t.Context(), "10.0.0.1", jwt(time.Now().Add(time.Hour)))
				if tc.want == "" && err != nil || tc.want != "" && (code(err) != http.StatusUnauthorized || !strings.Contains(err.Error(), tc.want)) {
					t.Errorf("error %v, want one with %q", err, tc.want)
				}
				if err != nil && (who.manager || who.pod != nil) {
					t.Errorf("rejected, but identified as %+v", who)
				}
			}
			if reviews != 1 {
				t.Errorf("%d token reviews", reviews)
			}
		})
	}
}

// Tokens without the audience of the store, or that have expired, are rejected without a token review.
func TestImplausibleTokens(t *testing.T) {
	at := time.Unix(1_900_000_000, 0)
	payload := func(text string) string { return "e30." + base64.RawURLEncoding.EncodeToString([]byte(text)) + ".e30" }
	const noToken = "not a service account token"
	cases := map[string]struct {
		token string
		now   time.Time
		want  string // part of the error; empty: plausible
	}{
		"token":               {jwt(at), at.Add(-time.Second), ""},
		"one audience":        {payload(`{"aud":"artifacts.semmoe.io","exp":1900000000}`), at.Add(-time.Hour), ""},
		"several audiences":   {payload(`{"aud":["x","artifacts.semmoe.io"],"exp":1900000000}`), at.Add(-time.Hour), ""},
		"ended":               {jwt(at), at, "it expired at 2030-03-17T17:46:40Z"},
		"another audience":    {payload(`{"aud":["x"],"exp":1900000000}`), at.Add(-time.Hour), `audiences ["x"]`},
		"no audience":         {payload(`{"exp":1900000000}`), at.Add(-time.Hour), "audiences []"},
		"no expiry":           {payload(`{"aud":["artifacts.semmoe.io"]}`), at, "it expired"},
		"two parts":           {"e30.e30", at, noToken},
		"not base64":          {"e30.*.e30", at, noToken},
		"not JSON":            {"e30.eHg.e30", at, noToken},
		"expiry as text":      {payload(`{"exp":"x"}`), at, noToken},
		"audiences as object": {payload(`{"aud":{},"exp":1900000000}`), at, noToken},
		"nonsense":            {"nonsense", at, noToken},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			err := plausible(tc.token, tc.now)
			if tc.want == "" && err != nil || tc.want != "" && (code(err) != http.StatusUnauthorized || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

// The number of token reviews for made-up tokens is limited per address. They delay neither tokens of other addresses
// nor confirmed tokens.
func TestInvalidTokensAreLimited(t *testing.T) {
	clients := fake.NewClientset()
	ours, reviews := jwt(time.Now().Add(time.Hour)), 0
	clients.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		reviews++
		status := authenticationv1.TokenReviewStatus{}
		if action.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).Spec.Token == ours {
			status = authenticationv1.TokenReviewStatus{
				Authenticated: true, Audiences: []string{artifact.Audience}, User: authenticationv1.UserInfo{Username: "system:serviceaccount:s:m"},
			}
		}
		return true, &authenticationv1.TokenReview{Status: status}, nil
	})
	r := newReviewer(clients, types.NamespacedName{Namespace: "s", Name: "m"}, newMetrics(prometheus.NewRegistry()))
	is := func(address, token string, want int) {
		t.Helper()
		if _, err := r.identify(t.Context(), address, token); code(err) != want {
			t.Errorf("%s: error %v, want status %d", address, err, want)
		}
	}
	is("10.0.0.1", ours, 0)
	refused := 0
	for i := range 1000 {
		if _, err := r.identify(t.Context(), "10.0.0.1", jwt(time.Now().Add(time.Hour+time.Duration(i)*time.Second))); code(err) == http.StatusTooManyRequests {
			refused++
		}
	}
	if refused < 900 || reviews > 100 {
		t.Errorf("%d of 1000 made-up tokens were rejected without a token review, with %d reviews", refused, reviews)
	}
	r.known.RemoveAll(func(any) bool { return true })
	is("10.0.0.1", ours, 0)
	is("10.0.0.2", jwt(time.Now().Add(2*time.Hour)), http.StatusUnauthorized)
}

func jwt(expiry time.Time) string {
	return "e30." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"aud":[%q],"exp":%d}`, artifact.Audience, expiry.Unix())) + ".e30"
}
