// SPDX-License-Identifier: Apache-2.0

package engine

// The arguments of SGLang and vLLM for TLS and for a key that clients must send, and vLLM's variable for the key.
var (
	tlsFlags    = []string{"--ssl-certfile", "--ssl-keyfile"}
	keyFlag     = "--api-key"
	keyVariable = "VLLM_API_KEY"
)

// TLSFlags returns the flags of SGLang and vLLM with which an engine serves TLS. --enable-ssl-refresh is not among them:
// it watches files, and misses every renewal after the first one, because Kubernetes replaces the files of a mounted
// Secret by new ones (measured with watchfiles 1.3.0, the library of both engines).
func TLSFlags(launch Launch) []Flag {
	if launch.CertFile == "" {
		return nil
	}
	const source = "spec.engine.tls"
	return []Flag{
		{Names: tlsFlags[:1], Value: launch.CertFile, Source: source},
		{Names: tlsFlags[1:], Value: launch.KeyFile, Source: source},
	}
}

// checkAccess warns if the engine would refuse the operator's requests: readiness probes, profiles and output probes have
// no key, and use TLS only with spec.engine.tls, with which Args refuses the flags.
func checkAccess(s Situation, verdict *Support) {
	if _, given := FlagValue(s.UserArgs, tlsFlags...); given && s.Launch.CertFile == "" {
		verdict.Warn("EngineServesTLS", "spec.engine.args sets %s: readiness probes and routers use plain text without spec.engine.tls, so the pods never become ready. Remove the flag, and set spec.engine.tls instead", tlsFlags[0])
	}
	what, given := "spec.engine.args sets "+keyFlag, false
	if s.Sets(keyVariable) {
		what, given = "spec.engine.env sets "+keyVariable, true
	}
	if _, byFlag := FlagValue(s.UserArgs, keyFlag); byFlag || given {
		verdict.Warn("EngineRequiresKey", "%s: profiles and output probes have no key, the engine refuses them, and no plan is made or rolled out. Remove it; spec.routing.auth checks the keys of clients", what)
	}
}
