// SPDX-License-Identifier: Apache-2.0

package lookup

import (
	"context"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// An object that is missing in the cache is read from the API server; a cached object is not.
func TestFind(t *testing.T) {
	object := func(version string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "o"}, Data: map[string]string{"from": version}}
	}
	away := errors.New("connection refused")
	with := func(err error, objects ...client.Object) client.Reader {
		return fake.NewClientBuilder().WithObjects(objects...).WithInterceptorFuncs(interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
				if err != nil {
					return err
				}
				return c.Get(ctx, key, into, options...)
			},
		}).Build()
	}
	for name, c := range map[string]struct {
		cache, live client.Reader
		found       bool
		from        string
		fails       bool
	}{
		"in the cache":          {with(nil, object("cache")), with(away), true, "cache", false},
		"not in the cache yet":  {with(nil), with(nil, object("live")), true, "live", false},
		"nowhere":               {with(nil), with(nil), false, "", false},
		"not known":             {with(nil), with(away), false, "", true},
		"the cache is not read": {with(away), with(nil, object("live")), false, "", true},
	} {
		got := &corev1.ConfigMap{}
		found, err := Find(t.Context(), c.cache, c.live, client.ObjectKey{Namespace: "n", Name: "o"}, got)
		if found != c.found || (err != nil) != c.fails || got.Data["from"] != c.from {
			t.Errorf("%s: %t, %v, %v", name, found, err, got.Data)
		}
	}
}

// A client rejects a name that would result in another path.
func TestFindImpossibleName(t *testing.T) {
	refusing := fake.NewClientBuilder().WithInterceptorFuncs(interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return errors.New("invalid resource name")
		},
	}).Build()
	for _, name := range []string{"a/b", "..", "a%b"} {
		key := client.ObjectKey{Namespace: "n", Name: name}
		if found, err := Find(t.Context(), fake.NewClientBuilder().Build(), refusing, key, &corev1.ConfigMap{}); found || err != nil {
			t.Errorf("%q: %t, %v", name, found, err)
		}
	}
}
