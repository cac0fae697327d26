// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"crypto/x509"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"
)

// FuzzParse parses arbitrary certificates and keys. It verifies that the certificates of an accepted CA are valid for
// its bundle.
func FuzzParse(f *testing.F) {
	now := time.Now()
	first, err := newSecret(types.NamespacedName{}, "s", now)
	if err != nil {
		f.Fatal(err)
	}
	other, err := newSecret(types.NamespacedName{}, "s", now)
	if err != nil {
		f.Fatal(err)
	}
	certificate, key := first.Data[corev1.TLSCertKey], first.Data[corev1.TLSPrivateKeyKey]
	f.Add(certificate, key)
	f.Add(append(append([]byte{}, certificate...), other.Data[corev1.TLSCertKey]...), key)
	f.Add(other.Data[corev1.TLSCertKey], key)
	f.Add(certificate[:len(certificate)/2], key)
	f.Add(key, certificate)
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, certificates, key []byte) {
		secret := &corev1.Secret{Data: map[string][]byte{corev1.TLSCertKey: certificates, corev1.TLSPrivateKeyKey: key}}
		a, err := parse(secret, now)
		if err != nil {
			return
		}
		bundle, err := a.Bundle()
		if err != nil {
			t.Fatal(err)
		}
		trusted, err := cert.ParseCertsPEM(bundle)
		if err != nil || len(trusted) != len(a.certificates) {
			t.Fatalf("%d of %d certificates, %v", len(trusted), len(a.certificates), err)
		}
		issued, err := a.Issue([]string{"h"}, now)
		if err != nil {
			return
		}
		leaf, err := x509.ParseCertificate(issued.Certificate[0])
		if err == nil {
			err = leaf.CheckSignatureFrom(trusted[0])
		}
		if err != nil {
			t.Error(err)
		}
	})
}
